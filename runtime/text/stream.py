"""TextStream: token ids in, text that is safe to send out. Stdlib only.

Works on bytes from end to end, because a token need not hold whole characters: a token contributes
its *piece* (bytes), stop strings are matched as UTF-8 (which is self-synchronizing), and only then
is text made. So the pieces of the text sent are exactly the pieces of the tokens, and the text does
not depend on how many tokens arrive at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class TextStream:
    """Incremental detokenizing of one generated sequence, with stop strings.

    What may still change is held back: the bytes of an unfinished character and the beginning of a
    possible stop string. Stop strings are looked for after each token; the match that begins first
    wins (the shorter one of two that begin together). Nothing of it is ever sent, unless
    `include_stop`, and tokens after the one that completed it are not consumed. Nothing stops
    before `min_tokens` tokens.

    Attributes:
        stopped: the stop string that matched, or None.
        num_tokens: tokens consumed, including the one that completed a stop string.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`pieces[i]` are the bytes token i adds to the text; ids beyond it add nothing."""
        self.stopped: str | None = None
        self.num_tokens = 0
        self._pieces = pieces
        self._stops = [(s.encode(), s) for s in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = bytearray()
        self._open: deque[bytes] = deque()  # pieces of tokens whose text is not fully sent
        self._open_sent = 0  # bytes of the first open piece (and on) that were sent
        self._settled: list[bytes] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Consume tokens; returns the text that can be sent now (often one token late)."""
        for token in token_ids:
            if self.stopped is not None:
                break
            self._consume(self._pieces[token] if token < len(self._pieces) else b"")
        if self.stopped is not None:
            return self.finish()
        return self._send(len(self._held) - max(self._unfinished_char(), self._stop_prefix()))

    def finish(self) -> str:
        """The rest of the text; a character cut off by the end becomes U+FFFD."""
        text = self._send(len(self._held))
        while self._open:
            self._settled.append(self._open.popleft()[: self._open_sent])
            self._open_sent = 0
        return text

    def take_settled(self) -> list[bytes]:
        """Bytes contributed by each token, in order, for tokens settled since the last call.

        A token is settled once its bytes were sent or dropped. The list joined over a whole
        sequence is the text sent: tokens inside a removed stop string give b"", a token cut by one
        gives the part that was sent.
        """
        settled, self._settled = self._settled, []
        return settled

    def _consume(self, piece: bytes) -> None:
        self.num_tokens += 1
        self._held += piece
        self._open.append(piece)
        if self._stops and self.num_tokens >= self._min_tokens:
            self._match(len(self._held) - len(piece))

    def _match(self, num_old: int) -> None:
        """Only matches that end behind the first `num_old` bytes: others came too early."""
        found = [
            (at, len(stop), name)
            for stop, name in self._stops
            if (at := self._held.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found:
            at, length, self.stopped = min(found)
            del self._held[at + (length if self._include_stop else 0) :]

    def _send(self, num_bytes: int) -> str:
        sent = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        self._open_sent += num_bytes
        while self._open and self._open_sent >= len(self._open[0]):
            piece = self._open.popleft()
            self._open_sent -= len(piece)
            self._settled.append(piece)
        return sent.decode("utf-8", "replace")

    def _unfinished_char(self) -> int:
        """Length of the trailing bytes that begin a character but do not complete it."""
        tail = bytes(self._held[-3:])
        for size in range(1, len(tail) + 1):
            lead = tail[-size]
            if lead & 0xC0 == 0x80:  # a continuation byte: look further left
                continue
            needed = 2 if 0xC2 <= lead < 0xE0 else 3 if lead & 0xF0 == 0xE0 else 0
            needed = needed or (4 if 0xF0 <= lead < 0xF5 else 1)
            return size if size < needed and _is_prefix(tail[-size:]) else 0
        return 0

    def _stop_prefix(self) -> int:
        """Length of the longest tail of the held bytes that could grow into a stop string."""
        longest = 0
        for stop, _ in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _is_prefix(tail: bytes) -> bool:
    """Whether some continuation makes `tail` one valid character (E0 80 or F4 90 never do)."""
    try:
        tail.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
