"""A request to stop, by signal, that is answered at a good moment."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["StopRequest"]

_log = logging.getLogger(__name__)


class StopRequest:
    """Context in which SIGTERM and SIGINT ask for a stop instead of ending the process.

    The first signal is noted: a loop looks at the object after each iteration, saves and returns. A second
    one acts as it would have without this. Outside the main thread signals cannot be caught, and
    nothing is.

    Attributes:
        signal (signal.Signals or None): the signal that asked.

    Examples:
        >>> import os, signal
        >>> from torchrl_trudi.trainers.stop_request import StopRequest
        >>> with StopRequest() as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(bool(stop), stop.signal.name)
        True SIGTERM
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        _log.warning(
            "%s: the run saves and ends after this iteration; once more ends it at once",
            self.signal.name,
        )
