"""PaddlePaddle: PaddleSeg, PaddleClas, PaddleDetection, PaddleOCR and PaddleNLP.

    2023-07-27 12:54:51 [INFO]	[TRAIN] epoch: 1, iter: 15/400, loss: 2.25, lr: 0.01, batch_cost: 1.1038, reader_cost: 0.21506, ips: 7.2474 samples/sec | ETA 00:07:04
    [2022/05/01 10:00:00] ppcls INFO: [Train][Epoch 2/120][Iter: 10/1252]lr: 0.1, loss: 7.1, batch_cost: 0.26383s, reader_cost: 0.00370, ips: 242.585 images/sec, eta: 10:32:12
    [07/27 12:54:51] ppdet.engine INFO: Epoch: [1] [ 20/1241] learning_rate: 0.01 loss: 3.1 eta: 1:02:03 batch_cost: 0.3512 data_cost: 0.0102 ips: 22.779 images/s
    [2022-07-27 08:53:13,144] [    INFO] - global step 10, epoch: 0, batch: 9, loss: 11.62, avg_reader_cost: 0.00040 sec, avg_batch_cost: 0.35000 sec, avg_samples: 16.00, ips: 45.714 sequences/sec
    [2022-08-31 14:25:49,741] [    INFO] - loss: 1.21, learning_rate: 2.9e-05, global_step: 10, interval_runtime: 3.5000, interval_samples_per_second: 45.714, interval_steps_per_second: 2.857, epoch: 0.1

Costs are means since the line before; PaddleClas (`[Train][Epoch`) prints means since the epoch's
sixth iteration, which are undone. Steps are global where the line has a global step (or an
`iter` that goes on over epochs), else they count anew in every epoch. Evaluation lines are left out.
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re
from math import isnan

from failslow.ingest.base import NAN, NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import EpochSteps, clock_in, find_number

__all__ = ["READER", "PaddleReader"]

_COST = re.compile(rf"\b(?:avg_)?batch_cost: ({NUMBER})s?[,\s]")
_READER_COST = re.compile(rf"\b(?:avg_)?(?:reader|data)_cost: ({NUMBER})")
_SAMPLES = re.compile(rf"\bavg_samples: ({NUMBER})[,\s]")
_IPS = re.compile(r"\b(?:avg_)?ips: (\d+\.\d+)[,\s]")
_RUNTIME = re.compile(rf"\binterval_runtime: ({NUMBER}),")
_STEPS_PER_S = re.compile(rf"\binterval_steps_per_second: ({NUMBER}),")
_SAMPLES_PER_S = re.compile(rf"\binterval_samples_per_second: ({NUMBER}),")
_GLOBAL_STEP = re.compile(r"\bglobal[_ ]step:? (\d{1,18})")
_EPOCH = re.compile(r"\b[Ee]poch:?\s*\[?\s*(\d{1,9})")
_INDEX = re.compile(
    r"(?:\b(?:[Ii]ter|[Bb]atch|[Bb]atch_id|step):?\s*\[?\s*|\bEpoch: \[\d+\] \[\s*)"
    r"(\d{1,18})(?:/(\d{1,18}))?"
)
_EVALUATION = re.compile(r"\[?\b(?:EVAL|Eval|eval|val) ?(?:\]|-|step)")


class PaddleReader:
    """Reads the training lines of PaddlePaddle's toolkits."""

    name = "paddle"
    summary = "epoch: 1, iter: 15/400, ..., batch_cost: 1.1038, reader_cost: 0.21506, ips: 7.2474"
    priority = 50

    def matches(self, line: str) -> bool:
        """A step and what it cost."""
        if "batch_cost: " not in line and "interval_runtime: " not in line:
            return False
        return _EVALUATION.search(line) is None and _place(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Adds the mean cost of a batch since the line before."""
        steps: dict[str, EpochSteps] = {}
        means: dict[str, _MeanOfEpoch] = {}
        for line in source.lines():
            writer, rest = split_prefix(line)
            place = _place(rest) if self.matches(rest) else None
            if place is None:
                continue
            duration_s, iterations, work = _times(rest)
            data_s = find_number(_READER_COST, rest)
            if "[Train][Epoch " in rest:
                meters = means.setdefault(writer, _MeanOfEpoch())
                undone = meters.undo(place[0], place[1], duration_s, data_s)
                if undone is None:
                    continue
                duration_s, data_s = undone
            builder.add(
                step=steps.setdefault(writer, EpochSteps()).step(*place),
                duration_s=duration_s,
                iterations=iterations,
                clock_s=clock_in(rest),
                work=work,
                data_s=data_s,
                writer=writer,
            )


class _MeanOfEpoch:
    """PaddleClas's meters, set back before the sixth iteration of an epoch and only there."""

    _SET_BACK = 5

    def __init__(self) -> None:
        self._epoch, self._count, self._totals_s = -1, 0, (0.0, 0.0)
        self._undone: tuple[float, float] | None = None

    def undo(
        self, epoch: int, index: int, cost_s: float, data_s: float
    ) -> tuple[float, float] | None:
        """(cost, data) since the line before; None where the epoch before is still in them."""
        count = index + 1 - self._SET_BACK
        if count < 1 or isnan(cost_s):
            return None
        if (epoch, count) == (self._epoch, self._count):  # the same line again
            return self._undone
        goes_on = epoch == self._epoch and count > self._count
        since, then = (self._count, self._totals_s) if goes_on else (0, (0.0, 0.0))
        self._epoch, self._count = epoch, count
        self._totals_s = cost_s * count, data_s * count
        covered = count - since
        self._undone = (
            (self._totals_s[0] - then[0]) / covered,
            (self._totals_s[1] - then[1]) / covered,
        )
        return self._undone


def _place(line: str) -> tuple[int, int, int] | None:
    """(epoch, step, iterations per epoch or 0)."""
    found = _GLOBAL_STEP.search(line)
    if found is not None:
        return 0, int(found[1]), 0
    epoch, index = _EPOCH.search(line), _INDEX.search(line)
    if index is None:
        return None
    return int(epoch[1]) if epoch else 0, int(index[1]), int(index[2] or 0)


def _times(line: str) -> tuple[float, int, float]:
    """(seconds per iteration, iterations or 0, samples per iteration)."""
    cost_s = find_number(_COST, line)
    if not isnan(cost_s):
        samples = find_number(_SAMPLES, line)
        return cost_s, 0, find_number(_IPS, line) * cost_s if isnan(samples) else samples
    runtime_s, steps_per_s = find_number(_RUNTIME, line), find_number(_STEPS_PER_S, line)
    covered = runtime_s * steps_per_s
    if not 0 < covered < 1e9:
        return NAN, 0, NAN
    iterations = max(1, round(covered))
    duration_s = runtime_s / iterations
    return duration_s, iterations, find_number(_SAMPLES_PER_S, line) * duration_s


READER = PaddleReader()
