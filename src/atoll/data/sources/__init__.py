"""The kinds of source, and how they are told apart."""

from atoll.data.source import Options, Source


def detect(spec: str, options: Options) -> Source:
    """The source that `spec` names."""
    from atoll.data.emoji import EmojiSource

    return EmojiSource(spec.removeprefix("emoji").removeprefix(":"), options)
