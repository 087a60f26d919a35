"""A bad line between a publisher and its subscribers: it loses messages at random, while it is told to."""

import random
from threading import Thread

import zmq


class LossyRelay:
    """Subscribes at `source`, publishes at `endpoint`. A context manager."""

    def __init__(self, source: str, endpoint: str, seed: int, loss: float) -> None:
        self.loss = loss
        self.num_lost = 0
        self.num_passed = 0
        self.has_subscriber = False
        self._rng = random.Random(seed)
        self._is_open = True
        context = zmq.Context.instance()
        self._in, self._out = context.socket(zmq.SUB), context.socket(zmq.XPUB)
        for one in (self._in, self._out):
            one.set_hwm(0)
        self._in.connect(source)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._out.bind(endpoint)
        self._thread = Thread(target=self._run)

    def __enter__(self) -> "LossyRelay":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        self._thread.join()
        self._in.close(linger=0)
        self._out.close(linger=0)

    def _run(self) -> None:
        while self._is_open:
            while self._out.poll(0):
                self._out.recv()
                self.has_subscriber = True
            if self._in.poll(20):
                frames = self._in.recv_multipart()
                if self._rng.random() < self.loss:
                    self.num_lost += 1
                else:
                    self._out.send_multipart(frames)
                    self.num_passed += 1
