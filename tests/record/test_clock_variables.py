"""Which variables of a function are made of the time of a clock."""

from __future__ import annotations

import time
from typing import Any

from ddpcheck.record.source.program_numbers import clock_variables


class Loop:
    def run(self, loader: Any, meter: Any, logger: Any) -> None:
        began, correct = time.time(), 0
        for number, batch in enumerate(loader):
            correct += int(batch)
            accuracy = correct / (number + 1)
            self.batch_time.update(time.time() - began, 1)  # type: ignore[attr-defined]
            meter.update(accuracy, 1)
            logger.update(accuracy=accuracy, seconds=time.time())
            left = self.batch_time.average * 3  # type: ignore[attr-defined]
            rate = correct / (time.perf_counter() - began)
            shown = {"accuracy": accuracy, "rate": rate}
            print(left, shown)


def test_timers_and_rates_are_known_and_metrics_beside_them_are_left() -> None:
    found = clock_variables(Loop.run.__code__)
    assert found == {"self.batch_time", "left", "rate"}  # what is set together with others is not followed
