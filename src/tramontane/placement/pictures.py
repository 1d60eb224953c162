"""Images on their way to Ray's workers. Each is put into Ray's object store once, from which a
machine fetches it once, however many of its workers, calls and updates take it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import ray

from tramontane.batches import TrainBatch, TrainSequence
from tramontane.types import Completion

KEPT_BYTES = 2**28  # of images; those that a call still carries are kept by Ray


class Pictures:
    """The images of a run that are in the object store; handles of workers share it."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def sent(self, value: Any) -> Any:
        """An argument of a call, whose images are sent as their places in the store and arrive as
        plain text."""
        if isinstance(value, list):
            return [self.sent(item) for item in value]
        if isinstance(value, TrainBatch):
            return replace(value, groups=self.sent(value.groups))
        if isinstance(value, Completion | TrainSequence) and (value.images or value.put_images):
            shown, put = (tuple(map(self._store, own)) for own in (value.images, value.put_images))
            return replace(value, images=shown, put_images=put)
        return value

    def _store(self, image: str) -> str:
        with self._lock:
            if (found := self._stored.get(image)) is None:
                found = self._stored[image] = _Stored(image)
                found.place = ray.put(image)
                self._bytes += len(image)
                while len(self._stored) > 1 and self._bytes > KEPT_BYTES:
                    self._bytes -= len(self._stored.popitem(last=False)[0])
            self._stored.move_to_end(image)
            return found


class _Stored(str):
    """An image that is pickled as its place in the object store."""

    __slots__ = ("place",)
    place: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return ray.get, (self.place,)
