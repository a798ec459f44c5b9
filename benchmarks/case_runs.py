"""A run over cases of models with random weights: loads each model once, keeps to a time limit, and leaves a reason
beside every case that has no figures.

Knows nothing of what is measured.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from agentspec.models.hf_config import TextConfig
from benchmarks.published import PrefilledModel, make_model
from benchmarks.running_engine import Case, let_go, missing_for_weights
from benchmarks.shared_model import ALONE, SharedModel


class DoesNotFitError(Exception):
    """The device has too little memory."""


class CaseResult(Protocol):
    note: str
    """The reason for missing figures."""

    @property
    def case(self) -> Case: ...


R = TypeVar("R", bound=CaseResult)


class CaseRun(Generic[R]):
    """Measures cases in sequence, within a time limit."""

    def __init__(
        self,
        configs: Mapping[str, TextConfig],
        device: torch.device,
        *,
        deadline: float,
        done: Callable[[R], None],
        dtype: torch.dtype = torch.bfloat16,
        fp8_drafts: bool | None = None,
        fp8_pages: bool = False,
        shared: SharedModel = ALONE,
    ) -> None:
        """configs: by the models' names in cases. deadline: on time.perf_counter's clock; no case starts after it.
        done: told of every result that was tried. dtype: of weights. fp8_drafts, fp8_pages: as in
        published.make_model. shared: the ranks that share every model, and agree on which cases they measure."""
        self._shared = shared
        self._configs = configs
        self._device = device
        self._deadline = deadline
        self._done = done
        self._dtype = dtype
        self._fp8_drafts = fp8_drafts
        self._fp8_pages = fp8_pages

    @property
    def time_is_up(self) -> bool:
        return self._shared.of_first(time.perf_counter() > self._deadline) > 0

    def require(self, missing: int) -> None:
        """Raises DoesNotFitError if so many bytes are missing on any rank."""
        missing = int(self._shared.largest(missing))
        if missing > 0:
            raise DoesNotFitError(f"does not fit: {missing / 2**30:.1f} GiB more than the device has")

    def make_room(self, name: str) -> None:
        """Free the previous model's memory. Raises DoesNotFitError if that is too little for this one's weights."""
        let_go()
        missing = missing_for_weights(
            self._configs[name], self._device, fp8_drafts=self._fp8_drafts is not False, rank=self._shared.rank
        )
        self.require(missing)

    def load(self, name: str) -> PrefilledModel:
        """Make a model. Raises DoesNotFitError."""
        self.make_room(name)
        config = self._configs[name]
        model = make_model(
            name,
            config,
            device=self._device,
            dtype=self._dtype,
            fp8_drafts=self._fp8_drafts,
            fp8_pages=self._fp8_pages,
            shared=self._shared,
        )
        let_go(model)
        return model

    def for_each(self, results: Sequence[R], measure: Callable[[R, PrefilledModel], None], *, what: str) -> None:
        """Measure each result with the model of its case, which consecutive cases share. what: a participle, for the
        reason of a case that was not reached."""
        for name, group in itertools.groupby(results, key=lambda result: result.case.model):
            model: PrefilledModel | None = None
            for result in group:
                if self.time_is_up:
                    result.note = f"not {what}: the time was up"
                    continue
                try:
                    model = model or self.load(name)
                    measure(result, model)
                except DoesNotFitError as error:
                    result.note = str(error)
                except torch.OutOfMemoryError as error:
                    if self._shared.rank.count > 1:
                        raise  # the other ranks would wait for this one
                    result.note = f"out of memory: {error}".partition("\n")[0]
                if model is not None:
                    let_go(model)
                self._done(result)
            del model
            gc.collect()
