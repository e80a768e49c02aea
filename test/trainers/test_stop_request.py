"""The first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from torchrl_trudi.trainers.stop_request import StopRequest

pytestmark = pytest.mark.resume


@pytest.fixture(autouse=True)
def _python_s_own_handler():
    """A process that runs tests for another one may have been given a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_and_second_signal(number):
    before = {each: signal.getsignal(each) for each in StopRequest.SIGNALS}
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number
        assert signal.getsignal(number) == before[number]
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    assert {each: signal.getsignal(each) for each in StopRequest.SIGNALS} == before


def test_is_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_nothing_is_caught():
    found = []

    def run():
        with StopRequest() as stop:
            found.append((bool(stop), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]
