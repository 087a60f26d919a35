"""Hooks on vLLM's scheduler: what watches it hears of its calls, and can neither slow nor stop them by what goes wrong.

Set on one scheduler and not on its class, so that others pay nothing. A failure is logged once, with its traceback.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

_logger = logging.getLogger("vllm.plugins.kvledger")


def on_every_scheduler(switch: str, attach: Callable[[Any, Any], object]) -> None:
    """attach(scheduler, vllm_config) for every scheduler that is made from now on. Again for a switch is harmless."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__
    attached: tuple[str, ...] = getattr(make, "kvledger_switches", ())
    if switch in attached:
        return

    @wraps(make)
    def make_and_attach(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        make(self, vllm_config, *args, **kwargs)
        try:
            attach(self, vllm_config)
        except Exception:  # whatever it is, the server goes on
            _logger.warning("%s: does not work here", switch, exc_info=True)

    make_and_attach.kvledger_switches = (*attached, switch)  # type: ignore[attr-defined]
    Scheduler.__init__ = make_and_attach


class Hooks:
    """Of one scheduler and one switch."""

    def __init__(self, scheduler: Any, switch: str) -> None:
        self._scheduler: Final = scheduler
        self._switch: Final = switch
        self._has_failed: bool = False

    def before(self, name: str, note: Callable[..., None]) -> None:
        """note(arguments of the call) before each call of that name."""
        call = getattr(self._scheduler, name)

        @wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._try(note, args)
            return call(*args, **kwargs)

        setattr(self._scheduler, name, noted)

    def after(self, name: str, note: Callable[..., None]) -> None:
        """note(result, arguments of the call) after each call of that name."""
        call = getattr(self._scheduler, name)

        @wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._try(note, (result, *args))
            return result

        setattr(self._scheduler, name, noted)

    def _try(self, note: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            note(*arguments)
        except Exception:  # whatever it is, the server goes on
            if not self._has_failed:
                _logger.warning("%s: something is missed; the next time nothing is said", self._switch, exc_info=True)
            self._has_failed = True
