"""Parse command lines with the parsers of the programs that they name, and run none of them.

Reads a list of command lines, each a list of words, as JSON from standard input; writes a list of
what is wrong with each, "" for nothing. Programs are ``tilewise`` and scripts of ``python``.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
from unittest import mock

from tilewise import cli

PARSE = argparse.ArgumentParser.parse_args


class Parsed(BaseException):
    """Ends a program as soon as it has parsed its command line."""


def parse_and_stop(parser, args=None, namespace=None):
    parser.allow_abbrev = False  # a page names options in full
    PARSE(parser, args, namespace)
    raise Parsed


def start(words):
    sys.argv = words[1:]
    match words:
        case ["tilewise", *rest]:
            cli.main(rest)
        case ["python", "-m", module, *_]:
            sys.argv = words[2:]
            runpy.run_module(module, run_name="__main__")
        case ["python", script, *_]:
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")


def complaint(words):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            start(words)
    except Parsed:
        return ""
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return "it ran without parsing its command line"


with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
    complaints = [complaint(words) for words in json.load(sys.stdin)]
print(json.dumps(complaints))
