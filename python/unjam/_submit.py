"""The one sequence in which a call is made: checks, a request, options, the C function.

What fails on the way submits nothing, and leaves no request that waits for a completion.
"""

from __future__ import annotations

import ctypes
from typing import Any

from . import _arguments, _completion
from ._arguments import Arguments
from ._context_handle import ContextHandle
from ._devices import call_options, call_stream, check_place
from ._lib import check, library
from .options import Options
from .request import Request


def submit(
    context: ContextHandle,
    name: tuple[str, str, str],
    what: Arguments,
    options: Options,
    algorithm: bytes | None,
    function: str,
    arguments: tuple[Any, ...],
) -> Request:
    """Makes one C call.

    Args:
        context: that the call is made on.
        name: of the call, for messages: what it is, its key, its group.
        what: its buffers.
        options: of the call.
        algorithm: as C takes it.
        function: of the C API.
        arguments: what comes before the options in its signature.
    """
    check_place(what.place, context._place, context.rank)
    _, _, priority, callback, stream, in_stream, _ = options
    queue, order = call_stream(stream, in_stream, context._place)
    request = Request(context, name, what.output, what.keep, callback, queue, in_stream)
    if type(priority) is not int or not -1 << 31 <= priority < 1 << 31:
        priority = _arguments.integer(priority, "priority")
    number, address = 0, None
    if callback is not None:
        _arguments.check_callback(callback)
        number, address = _completion.register(request), _completion.ADDRESS
    given = None
    if priority or number or order or algorithm is not None:
        given = ctypes.byref(call_options(priority, address, number, queue, order, algorithm))
    if not context._enter():
        _completion.forget(number)
        raise context._closed_error()
    try:
        code = getattr(library(), function)(*arguments, given, ctypes.byref(request._handle))
        if code:
            check(code)
    except BaseException:
        if not request._handle:
            _completion.forget(number)
        raise
    finally:
        context._leave()
    return request
