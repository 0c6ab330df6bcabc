"""Steps of the embedded trainer: the base model, loaded once, and what stays in memory between steps."""

from __future__ import annotations

from reef.core.wire import Step, Stepped
from reef.trainers import Ground, Report
from reef.trainers.local import Options
from reef.trainers.local.llama import Llama
from reef.trainers.local.shelf import Shelf
from reef.trainers.local.step import advance


class LocalWork:
    def __init__(self, ground: Ground, options: Options) -> None:
        self._ground = ground
        self._model = Llama.load(ground.folder)
        self._shelf = Shelf(self._model)

    def advance(self, order: Step, report: Report) -> Stepped:
        ground = self._ground
        return advance(
            self._model,
            ground.training,
            order,
            ground.resolve,
            report=report,
            digest=ground.digest,
            shelf=self._shelf,
        )

    def close(self) -> None:
        pass
