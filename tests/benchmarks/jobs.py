"""Jobs for child processes; nothing heavy is imported here."""

import os
import time


def counts(items, *more):
    """Print noise, yield each item, and hang, die or raise where an item says so."""
    print("noise")
    for item in items:
        if item == "hang":
            time.sleep(60)
        elif item == "die":
            os._exit(3)
        elif item == "raise":
            raise ValueError("want a number; got a word")
        yield [item, *more]
