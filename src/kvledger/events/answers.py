"""Answers: what consumers asked for, sent as fast as they read it and never faster.

A ROUTER socket queues for every client what the client does not read. Here a client gets a few messages ahead and the
rest when it has read them; one that stops reading is given up, without an end, after a time. So clients can make the
publisher hold a few messages each, and there are only so many at a time.

    asked -> Answer(next number, last number) -> as many frames as the socket takes, each time serve() is called
"""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)
# Messages that wait in line for one client.
MESSAGES_AHEAD: Final = 16
# Questions that wait to be read.
_QUESTIONS_AHEAD: Final = 64
# However steadily a client reads, this is the end.
_LONGEST_ANSWER_S: Final = 60.0
# Frames of one call for one client, so that live events do not wait for a long answer.
_FRAMES_AT_ONCE: Final = 64
# Questions are short; longer messages are not read.
_MAX_QUESTION_BYTES: Final = 1024

# Number and payload of each message of an answer.
Parts = Iterator[tuple[int, bytes]]


class _Answer:
    """What is still to be sent to one client."""

    def __init__(self, client: bytes, parts: Parts, now: float) -> None:
        self.client: Final = client
        self.parts: Final = parts
        # Taken from the parts and not sent yet; None: the end is to be sent.
        self.waiting: tuple[int, bytes] | None = next(parts, None)
        self.start: Final = now
        self.last_progress: float = now


class AnswerSocket:
    """A ROUTER and the answers that it gives."""

    def __init__(
        self, socket: Any, zmq: Any, topic: bytes, find: Callable[[bytes], Parts], most: int, timeout: float
    ) -> None:
        """`socket`: not bound yet. `find`: from a question's last frame to the parts of the answer. `most`: answers
        at a time. `timeout`: seconds after which a client that reads nothing is given up."""
        self._socket: Final = socket
        self._zmq: Final = zmq
        self._topic: Final = topic
        self._find: Final = find
        self._most: Final = most
        self._timeout: Final = timeout
        self._answers: list[_Answer] = []
        self.num_given_up: int = 0
        socket.setsockopt(zmq.SNDHWM, MESSAGES_AHEAD)
        socket.setsockopt(zmq.RCVHWM, _QUESTIONS_AHEAD)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        # A client whose line is full is an error to wait for; without this, its messages would be lost in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def num_answers(self) -> int:
        """Answers under way."""
        return len(self._answers)

    def serve(self) -> None:
        """Takes questions and sends what can be sent, without waiting."""
        now = monotonic()
        while len(self._answers) < self._most and (frames := self._receive()) is not None:
            # What is no question is passed over, as vLLM does.
            if len(frames) == 3:
                self._answers.append(_Answer(frames[0], self._find(frames[2]), now))
        if self._answers:
            self._answers = [answer for answer in self._answers if not self._send(answer, now)]

    def _send(self, answer: _Answer, now: float) -> bool:
        """Sends what the client takes; True when nothing more is to be sent to it."""
        try:
            for _ in range(_FRAMES_AT_ONCE):
                part = answer.waiting
                if part is None:
                    self._send_frames(answer.client, b"", END_SEQ, b"")
                    return True
                seq, payload = part
                self._send_frames(answer.client, self._topic, seq.to_bytes(8, "big"), payload)
                answer.last_progress = now
                answer.waiting = next(answer.parts, None)
        except self._zmq.Again:
            if now - answer.last_progress < self._timeout and now - answer.start < _LONGEST_ANSWER_S:
                return False
            self.num_given_up += 1
            return True
        except self._zmq.ZMQError:
            # The client is gone.
            return True
        return False

    def _send_frames(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        self._socket.send_multipart((client, b"", topic, number, payload), self._zmq.NOBLOCK)

    def _receive(self) -> list[bytes] | None:
        try:
            frames: list[bytes] = self._socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames
