"""A deadlock between warpgroups of an interpreted kernel ends the test process, with a traceback of every thread."""

import faulthandler
import sys

import pytest


@pytest.fixture(autouse=True)
def never_hangs():
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
