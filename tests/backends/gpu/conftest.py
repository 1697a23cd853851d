"""A kernel whose warpgroups wait for each other for ever ends the process that runs it, and says where they wait."""

import faulthandler
import sys

import pytest


@pytest.fixture(autouse=True)
def never_hangs():
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
