"""The media process: looks at files that clients sent, and makes pixels of those that are to be encoded.

Runs as `media0..`, of vision models alone:

    api         Prepare                ->  media  ->  Prepared                 api
    scheduler   WantPixels, PixelsDone ->  media  ->  Pixels, PixelsFailed     scheduler
"""

from __future__ import annotations

from engine.messages import Message
from engine.process.actor import Actor
from engine.process.context import ActorContext
from shm.death_notes import DeathNotes


class MediaActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._notes = DeathNotes.attach(context.run.run_id, context.name)
        self._slab = context.own_slab()

    def on_start(self) -> None:
        self.context.counter("pixel_slab_used_bytes").set(self._slab.num_used_bytes)

    def on_message(self, sender: str, message: Message) -> None:
        raise AssertionError(f"{type(message).__name__} from {sender} is not for a media process")

    def on_stop(self) -> None:
        self._notes.close()
        self._slab.close()
