"""One run: a teacher with its data, and the results of its stages, which a killed run finds again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from shd_torch.compress.costs import Progress, Setting
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import Samples
from shd_torch.compress.space import find_space
from shd_torch.compress.task import Judge, find_task, model_run
from shd_torch.shrink.families import family_of
from shd_torch.shrink.folders import load_teacher
from shd_torch.shrink.sizes import sizes_of
from shd_torch.shrink.unfinished import Unfinished


class Run:
    """What all stages read; each result is kept, as JSON, when it is finished."""

    def __init__(
        self, teacher: Path, options: CompressOptions, keeper: Unfinished, progress: Progress, samples: Samples
    ) -> None:
        self.teacher, self.options, self.keeper = teacher, options, keeper
        self.progress, self.samples, self.folder = progress, samples, keeper.folder
        self.model = load_teacher(teacher)
        self.family = family_of(self.model, None)
        self.own = sizes_of(self.model.config, self.family)
        self.space = find_space(self.own, self.family, self.model.config)
        self.task = find_task(teacher, self.model)
        length = options.length if "input_ids" in samples.train[0] else None
        self.setting = Setting(options.batch, length, options.threads, options.int8)
        self._judges: dict[tuple[str, int | None], Judge] = {}

    def find(self, name: str, make: Callable[[], Any]) -> Any:
        """What an earlier run found, or what is found now."""
        if self.keeper.get(name) is None:
            self.keeper.put(name, {}, make())
        return self.keeper.require(name)[1]  # also now as a run that goes on gets it

    def judge(self, use: str, most: int | None = None) -> Judge:
        """Of the samples for one use."""
        if (use, most) not in self._judges:
            self._judges[use, most] = Judge(self.task, getattr(self.samples, use)[:most], model_run(self.model))
        return self._judges[use, most]

    def tell(self, what: str) -> Callable[[int, int], None]:
        """Progress of one stage."""
        return lambda done, total: self.progress(done, total, what)

    @cached_property
    def graphs(self) -> Path:
        """Folder of graphs."""
        folder = self.folder / "graphs"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def teacher_graphs(self) -> dict[str, Path]:
        """Written by the first stage."""
        paths = {"float": self.graphs / "teacher.onnx", "int8": self.graphs / "teacher.int8.onnx"}
        return paths if self.options.int8 else {"float": paths["float"]}
