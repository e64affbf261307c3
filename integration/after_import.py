"""Doing something to a module right after its import, whoever imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Apply ``action`` to a module: at once, or right after its import.

    Parameters
    ----------
    name : str
        Dotted name of the module, which is not imported here.
    action : Callable
        Gets the module. Of several for one module that is not there yet, the last one counts.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, AfterImport):
            finder.actions[name] = action
            return
    sys.meta_path.insert(0, AfterImport({name: action}))


class AfterImport(MetaPathFinder):
    """Runs an action after the import of a module, which others find and load."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self.actions = actions
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module where it is, and hook its loader."""
        if fullname not in self.actions or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.remove(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if (action := self.actions.pop(fullname, None)) is not None:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
