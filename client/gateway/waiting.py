"""Waiting with a limit."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def within(work: Coroutine[Any, Any, Result], limit_s: float | None) -> Result:
    """The work's result. Raises asyncio.TimeoutError, and cancels the work, when it takes longer.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that comes together with the result. Here they
    do come together: when a connection breaks, what waits to be sent goes on and the song is given up.
    """
    if limit_s is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
