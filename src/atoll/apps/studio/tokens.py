"""The token: how it is made, and how requests are checked against it.

Guesses are slowed. After a wrong token, the requests of the same address are checked one by one, GUESS_SECONDS apart.
Requests with the right token wait as well, because a fast response to the right token only would be all that a guesser
needs. Connections that have sent the right token before do not wait, so a page that is open stays usable while another
user of the machine, with the same address, guesses.
"""

import asyncio
import hmac
import ipaddress
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from atoll.apps.studio.schemas import ApiError

MIN_TOKEN_CHARACTERS = 16
# 192 bits, in 32 characters. Nobody types it: it is part of the printed address.
_RANDOM_BYTES = 24
# Four guesses a second are 10^8 a year, far fewer than the 10^28 tokens of 16 random letters and digits.
GUESS_SECONDS = 0.25
# Requests of one address that wait for their check; further ones get the status 429. The last one waits 4 s.
MAX_WAITING = 16
# Seconds after the last wrong token until an address is no longer slowed.
_FORGET_SECONDS = 60.0
# Bounds of the memory for addresses and connections, several times the maximum number of connections.
_MAX_ENTRIES = 4096

Client = tuple[str, int]
"""Address and port of a connection."""


def random_token() -> str:
    """Return a new token."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


@dataclass
class _Guesser:
    """An address that has sent a wrong token."""

    last: float
    """Time of its last wrong token."""
    turn: float = 0.0
    """Time of the last check that is scheduled."""
    waiting: int = 0


class TokenChecker:
    """Checks the Authorization header of requests."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._guessers: OrderedDict[str, _Guesser] = OrderedDict()
        self._proven: OrderedDict[Client, None] = OrderedDict()

    async def check(self, given: str, client: Client | None) -> ApiError | None:
        """Return an error if the token is missing or wrong; slow down addresses that guess."""
        if not given:
            return ApiError(401, "a token is required; send it as Authorization: Bearer TOKEN")
        client = client or ("", 0)
        address = _network(client[0])
        guesser = self._guesser(address)
        if guesser is not None and client not in self._proven:
            if guesser.waiting >= MAX_WAITING:
                seconds = MAX_WAITING * GUESS_SECONDS
                return ApiError(429, "too many wrong tokens came from this address; retry later", retry_after=seconds)
            await _wait_for_turn(guesser)
        # A comparison in constant time does not reveal how many characters were right.
        if hmac.compare_digest(given.encode("latin-1", "replace"), self._expected):
            self._proven[client] = None
            _bound(self._proven)
            return None
        now = asyncio.get_running_loop().time()
        self._guessers.setdefault(address, _Guesser(now)).last = now
        self._guessers.move_to_end(address)
        _bound(self._guessers)
        return ApiError(401, "the token is wrong")

    def _guesser(self, address: str) -> _Guesser | None:
        """Return an address that has sent a wrong token lately."""
        found = self._guessers.get(address)
        late = asyncio.get_running_loop().time() - _FORGET_SECONDS
        if found is not None and not found.waiting and found.last < late:
            del self._guessers[address]
            return None
        return found


async def _wait_for_turn(guesser: _Guesser) -> None:
    now = asyncio.get_running_loop().time()
    guesser.turn = max(guesser.turn, now) + GUESS_SECONDS
    guesser.waiting += 1
    try:
        await asyncio.sleep(guesser.turn - now)
    finally:
        guesser.waiting -= 1


def _network(address: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address: one client usually has 2^64 of them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address


def _bound(entries: "OrderedDict[str, _Guesser] | OrderedDict[Client, None]") -> None:
    while len(entries) > _MAX_ENTRIES:
        entries.popitem(last=False)
