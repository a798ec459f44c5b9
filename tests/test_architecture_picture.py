"""The picture of the rooms in the docs is what the code gives, and its arrows point down."""

from __future__ import annotations

from xml.etree import ElementTree

from scripts import architecture
from tests.test_architecture import FOUNDATION, ROOMS

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.picture(), (
        "docs/architecture.svg is not what the code gives: run `python -m scripts.architecture` and look at it"
    )


def test_arrows_point_down() -> None:
    house = architecture.survey()
    level = architecture.levels(house)
    assert level[architecture.BASE] == 0
    for room, target in house.num_importing:
        assert level[room] > level[target], f"{room} imports {target}"


def test_arrows_and_their_transitive_closure_cover_all_imports() -> None:
    """What is left out as an arrow can be reached over the arrows that are drawn."""
    house = architecture.survey()
    drawn = architecture.direct(house)
    assert set(drawn) <= set(house.num_importing)

    def reached(room: str) -> set[str]:
        return {name for source, target in drawn if source == room for name in (target, *reached(target))}

    for room in ROOMS:
        assert reached(room) == {
            name
            for name in ROOMS
            if name != room and any(name in {target, *reached(target)} for target in house.imported_by(room))
        }


def test_the_picture_names_every_room_and_every_loose_module() -> None:
    root = ElementTree.fromstring(architecture.PICTURE.read_text(encoding="utf-8"))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {*ROOMS, architecture.BASE} <= texts
    (loose,) = [text for text in texts if text and text.startswith(FOUNDATION[0] + ",")]
    assert loose.startswith(", ".join(FOUNDATION))
