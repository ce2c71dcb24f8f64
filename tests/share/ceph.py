"""Run the S3 server of Ceph on loopback: one monitor, one in-memory object store and one gateway."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from share.servers import CREDENTIALS, free_port
from waiting import HOUR

CONFIGURATION = """
[global]
fsid = {fsid}
mon initial members = a
mon host = [v1:127.0.0.1:{mon}]
auth cluster required = none
auth service required = none
auth client required = none
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
osd objectstore = memstore
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 1
run dir = {folder}
admin socket = {folder}/$cluster-$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
mgr data = {folder}/mgr
mgr initial modules =
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw}
"""
PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "monmaptool", "ceph")


def missing_requirement() -> str | None:
    """Return the reason why Ceph cannot be started here, or None."""
    if os.geteuid() != 0:
        return "CEPH IS NOT TESTED: its daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"CEPH IS NOT TESTED: {', '.join(absent)} not found; see scripts/install_debian.sh" if absent else None


@contextlib.contextmanager
def ceph() -> Iterator[str]:
    """Run the server in child processes; yield its address. It accepts the same credentials as moto."""
    with tempfile.TemporaryDirectory(prefix="ceph") as scratch, contextlib.ExitStack() as running:
        folder, fsid, ports = Path(scratch), str(uuid4()), {"mon": free_port(), "rgw": free_port()}
        conf = folder / "ceph.conf"
        conf.write_text(CONFIGURATION.format(fsid=fsid, folder=folder, **ports))
        for name in ("mon", "osd", "mgr", "rgw"):
            (folder / name).mkdir()

        def do(*command: str) -> None:
            subprocess.run([command[0], "-c", str(conf), *command[1:]], check=True, capture_output=True, timeout=HOUR)

        def start(*command: str) -> None:
            log = (folder / f"{command[0]}.out").open("wb")
            server = subprocess.Popen([command[0], "-c", str(conf), "-f", *command[1:]], stdout=log, stderr=log)
            running.callback(server.wait)
            running.callback(server.kill)

        addresses = f"[v1:127.0.0.1:{ports['mon']}]"
        do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, str(folder / "monmap"))
        do("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        start("ceph-mon", "-i", "a")
        disk = str(uuid4())
        do("ceph", "osd", "new", disk)
        do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        start("ceph-mgr", "-i", "x")
        keys = [CREDENTIALS["AWS_ACCESS_KEY_ID"], "--secret-key", CREDENTIALS["AWS_SECRET_ACCESS_KEY"]]
        do("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", "--access-key", *keys)
        start("radosgw", "-n", "client.rgw")
        address = f"http://127.0.0.1:{ports['rgw']}"
        _wait_for_gateway(address)
        yield address


def _wait_for_gateway(address: str) -> None:
    deadline = time.monotonic() + HOUR
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            assert time.monotonic() < deadline, "Ceph's gateway does not respond"
            time.sleep(0.2)
