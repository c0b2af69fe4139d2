"""The drawn pictures are those of the script, with the same shapes in both languages."""

import re
from xml.etree import ElementTree

import pytest

from scripts import draw_concepts

FILES = draw_concepts.files()


@pytest.mark.parametrize("name", draw_concepts.PICTURES)
def test_the_pictures_are_the_script_s(name: str) -> None:
    shapes = []
    for tail in ("", "_zh"):
        path = draw_concepts.IMAGES / f"concept_{name}{tail}.svg"
        assert path.read_text(encoding="utf-8") == FILES[path], "run scripts/draw_concepts.py"
        root = ElementTree.fromstring(FILES[path])
        shapes.append([re.sub(r"\{.*\}", "", one.tag) for one in root.iter()])
    assert shapes[0] == shapes[1]
