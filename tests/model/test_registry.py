"""Plug-ins are found by name: those in the house by being there, others by being installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.model import registry
from redline.model.errors import UnknownName, UsageError
from redline.model.registry import Registry

GROUP = "redline.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A distribution as pip would leave it: a module, and metadata with entry points beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(name: str, source: str, entries: dict[str, str]) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {where}" for entry, where in entries.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        importlib.invalidate_caches()

    yield install
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[module]


class TestNames:
    def fruit(self) -> Registry[str]:
        fruit: Registry[str] = Registry("fruit")
        for name in ("cherry", "apple", "Banana"):
            fruit.register(name)(name.upper())
        return fruit

    @pytest.mark.parametrize(
        ("asked", "close"),
        [("appel", ["apple"]), ("CHERRY", ["cherry"]), ("bananas", ["Banana"]), ("xylophone", [])],
    )
    def test_that_are_wrong_are_answered_with_the_closest(self, asked: str, close: list[str]) -> None:
        with pytest.raises(UnknownName) as error:
            self.fruit().get(asked)
        assert error.value.close == close
        said = str(error.value)
        assert said.startswith(f"unknown fruit {asked!r}")
        assert ("did you mean" in said) == bool(close)

    def test_that_are_wrong_are_a_mistake_of_the_person(self) -> None:
        with pytest.raises(UsageError):
            Registry("fruit").get("apple")

    def test_belong_to_one_thing_only(self) -> None:
        fruit = self.fruit()
        with pytest.raises(ValueError, match="two fruits are called 'apple'"):
            fruit.register("apple")("GRANNY SMITH")
        assert fruit.get("apple") == "APPLE"


class TestThePackage:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        folder = tmp_path / "house_of_plugins"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        yield folder
        for module in [name for name in sys.modules if name.split(".")[0] == "house_of_plugins"]:
            del sys.modules[module]

    def things(self, monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
        things: Registry[str] = Registry("thing", package="house_of_plugins")
        monkeypatch.setattr(sys.modules[__name__], "THINGS", things, raising=False)
        return things

    def plug_in(self, package: Path, name: str, before: str = "") -> None:
        source = f"{before}\nimport sys\nsys.modules[{__name__!r}].THINGS.register({name!r})({name!r})\n"
        (package / f"{name}.py").write_text(source)

    def test_is_read_file_by_file_so_that_a_plug_in_is_one_new_file(
        self, package: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        things = self.things(monkeypatch)
        for name in ("one", "two"):
            self.plug_in(package, name)
        assert things.names() == ["one", "two"]

    def test_half_read_does_not_call_the_rest_unknown(self, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first mistake is the one to be told, as often as somebody asks."""
        things = self.things(monkeypatch)
        self.plug_in(package, "a_broken_one", before="import no_such_module_anywhere")
        self.plug_in(package, "one")
        for _ in range(2):
            with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
                things.get("one")
        self.plug_in(package, "a_broken_one")
        importlib.invalidate_caches()
        assert things.names() == ["a_broken_one", "one"]


class TestEntryPoints:
    def test_of_an_installed_distribution_stand_beside_those_of_the_house(self, install: Any) -> None:
        install("redline_guest", "class Step: greeting = 'hello'", {"guest-step": "redline_guest:Step"})
        steps: Registry[Any] = Registry("step", group=GROUP)
        steps.register("own")(object())
        assert steps.names() == ["guest-step", "own"]
        assert steps.get("guest-step").greeting == "hello"

    def test_are_loaded_when_asked_for_and_only_once(self, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        install("redline_guest", "thing = object()", {"guest": "redline_guest:thing"})
        asked: list[str] = []
        real = registry.entry_points

        def counted(*, group: str) -> Any:
            asked.append(group)
            return real(group=group)

        monkeypatch.setattr(registry, "entry_points", counted)
        steps: Registry[Any] = Registry("step", group=GROUP)
        assert asked == []
        assert "redline_guest" not in sys.modules
        assert steps.get("guest") is steps.get("guest")
        assert asked == [GROUP]

    def test_cannot_take_a_name_that_is_given(self, install: Any) -> None:
        install("redline_guest", "thing = object()", {"own": "redline_guest:thing"})
        steps: Registry[Any] = Registry("step", group=GROUP)
        steps.register("own")(object())
        with pytest.raises(UsageError, match=r"redline_guest:thing.*two steps are called 'own'"):
            steps.names()

    def test_of_two_distributions_under_one_name_are_told_of(self, install: Any) -> None:
        install("redline_guest", "thing = object()", {"guest": "redline_guest:thing"})
        install("redline_other", "thing = object()", {"guest": "redline_other:thing"})
        with pytest.raises(UsageError, match=r"redline_other:thing.*two steps are called 'guest'"):
            Registry("step", group=GROUP).get("guest")

    def test_of_a_broken_distribution_say_what_is_missing(self, install: Any) -> None:
        install("redline_guest", "import no_such_module_anywhere", {"guest": "redline_guest:thing"})
        steps: Registry[Any] = Registry("step", group=GROUP)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"redline_guest:thing.*no_such_module_anywhere"):
                steps.get("guest")
