"""Images in rows."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.pictures import picture
from tramontane.config import DataConfig
from tramontane.config.sft import ExamplesConfig
from tramontane.data.images import Album, as_text
from tramontane.data.load import RowRules, load_problems, parse_problem
from tramontane.data.objects import as_source, rows_of
from tramontane.data.similarity import near_copies
from tramontane.errors import InputError
from tramontane.models.images import Limits, content_of, data_uri, decode
from tramontane.run.input import _asked
from tramontane.sft.examples import rows_of as sft_rows
from tramontane.verifier.tasksets import _chat

PIXEL = Image.new("RGB", (1, 1), "red")
NOISE = picture(100, 100)


def load(source, **config):
    config = DataConfig(train=str(source), **config)
    return load_problems(str(source), config, split="train", limit=None, seed=0)


def write_rows(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def png(image=PIXEL, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


ROW = {"problem": "What is this?", "answer": "1"}
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
URI = data_uri(png())


@pytest.mark.parametrize("kind", ["path", "uri", "python", "parquet", "record", "bytes"])
def test_every_way_to_give_an_image_carries_the_same_bytes(tmp_path, kind):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.png").write_bytes(png())
    given = {"path": "a/b.png", "uri": URI, "python": PIXEL, "parquet": png(), "bytes": [png()]}
    given["record"] = {"bytes": png(), "path": "b.png"}
    row = ROW | {"images" if kind == "bytes" else "image": given[kind]}
    if kind in ("parquet", "record"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        [problem] = load(tmp_path / "rows.parquet")
    elif kind in ("python", "bytes"):
        with as_source(rows_of([row])) as source:
            [problem] = load(source)
    else:
        [problem] = load(write_rows(tmp_path, row))
    assert [content_of(image) for image in problem.images] == [png()]
    assert problem.metadata == {}


def test_content_parts_become_places(tmp_path):
    own = {"type": "image_url", "image_url": {"url": URI}}
    chat = [{"role": "user", "content": [*CHAT[0]["content"], own, {"type": "text", "text": "?"}]}]
    other = data_uri(png() + b"x")
    [problem] = load(write_rows(tmp_path, {"prompt": chat, "answer": "1", "images": [other]}))
    assert problem.images == [other, URI]
    assert problem.messages == [{"role": "user", "content": "<image>What?<image>?"}]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("nothing.png", "no such file"),
        ("https://example.org/a.png", "is an address"),
        ("file:///a.png", "is an address"),
        ("data:image/png;base64,AAAA", "not an image of the formats"),
        ("data:image/png;base64,?", "base64 is damaged"),
        ("data:image/png,abc", "must hold base64"),
        (data_uri(png(NOISE)[:-2000]), "a broken image file"),
        (3, "is a int"),
    ],
)
def test_an_image_that_cannot_be_read_names_its_row(tmp_path, image, says):
    with pytest.raises(InputError, match=rf"rows.jsonl:2: .*{says}"):
        load(write_rows(tmp_path, ROW, ROW | {"image": image}))


def test_a_broken_file_names_its_path(tmp_path):
    (tmp_path / "a.png").write_bytes(png(NOISE)[:2000])
    with pytest.raises(InputError, match=r"rows.jsonl:1: image .*a.png: a broken"):
        load(write_rows(tmp_path, ROW | {"image": "a.png"}))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_pixels": 99}, "10 x 10 pixels"),
        ({"max_bytes": 50}, "max_bytes"),
        ({"formats": ["JPEG"]}, "formats JPEG"),
    ],
)
@pytest.mark.parametrize("by_path", [True, False])
def test_limits_hold_before_anything_is_unpacked(tmp_path, limits, says, by_path):
    content = png(Image.new("RGB", (10, 10)))
    (tmp_path / "a.png").write_bytes(content)
    file = write_rows(tmp_path, ROW | {"image": "a.png" if by_path else data_uri(content)})
    with pytest.raises(InputError, match=says):
        load(file, images=limits)


def test_a_bomb_is_refused_by_its_header(tmp_path):
    """A file of a few bytes that would unpack to gigabytes."""
    header = bytearray(png())
    header[16:24] = (60000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(InputError, match="60000 x 60000|3600000000"):
        load(write_rows(tmp_path, ROW | {"image": data_uri(bytes(header))}))


# By orientation of EXIF, where the first stored pixel of 4 x 2 belongs.
CORNERS = {
    1: (0, 0), 2: (3, 0), 3: (3, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 3), 8: (0, 3),
}  # fmt: skip


@pytest.mark.parametrize("orientation", CORNERS)
def test_images_are_turned_as_the_camera_says(orientation):
    image = Image.new("RGB", (4, 2), "blue")
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = decode(data_uri(png(image, exif=exif)))
    assert turned.size == ((4, 2) if orientation < 5 else (2, 4))
    assert turned.getpixel(CORNERS[orientation]) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_white(mode):
    if mode == "P":
        image = Image.new("P", (2, 1), 0)
        image.info["transparency"] = 0
    else:
        image = Image.new("RGBA", (2, 1), (0, 0, 0, 0)).convert(mode)
    assert decode(data_uri(png(image))).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_of_gray_keep_their_shades():
    """Pillow's own conversion makes all above 255 white."""
    image = Image.fromarray(np.array([[0, 128 * 256, 255 * 256]], np.uint16))
    shades = [decode(data_uri(png(image))).getpixel((x, 0))[0] for x in range(3)]
    assert shades == [0, 128, 255]


def deep_png(kind: int, pixels: list[int], clear: list[int]) -> bytes:
    """A row of pixels of 16 bits, gray (0) or colors (2), one of which is transparent."""

    def chunk(name: bytes, data: bytes) -> bytes:
        ends = name + data
        return struct.pack(">I", len(data)) + ends + struct.pack(">I", zlib.crc32(ends))

    width = len(pixels) // len(clear)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, 16, kind, 0, 0, 0))
    header += chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear))
    row = chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(f">{len(pixels)}H", *pixels)))
    return b"\x89PNG\r\n\x1a\n" + header + row + chunk(b"IEND", b"")


@pytest.mark.parametrize("python", [False, True])
def test_a_transparent_color_of_sixteen_bits_is_white(python):
    def colors(content):
        uri = as_text(Image.open(io.BytesIO(content))) if python else data_uri(content)
        image = decode(uri)
        return [image.getpixel((x, 0)) for x in range(image.width)]

    white = (255, 255, 255)
    gray = deep_png(0, [0x1234, 0x1235, 0x8000], [0x1234])
    assert colors(gray) == [white, (0x12,) * 3, (0x80,) * 3]
    red = deep_png(2, [0x1234, 0x2000, 0, 0xFF00, 0, 0], [0x1234, 0x2000, 0])
    assert colors(red) == [white, (255, 0, 0)]


def test_an_animation_is_refused(tmp_path):
    file = io.BytesIO()
    PIXEL.save(file, "GIF", save_all=True, append_images=[Image.new("RGB", (1, 1), "blue")])
    with pytest.raises(InputError, match="several frames"):
        load(write_rows(tmp_path, ROW | {"image": data_uri(file.getvalue())}))


@pytest.mark.parametrize("places", [1, 3])
def test_as_many_places_as_images(tmp_path, places):
    row = {"problem": "<image>" * places + "?", "answer": "1", "images": [URI, URI]}
    with pytest.raises(InputError, match=rf"2 images for {places} places"):
        load(write_rows(tmp_path, row))


def test_a_mark_without_images_is_text(tmp_path):
    [problem] = load(write_rows(tmp_path, ROW | {"problem": "The HTML tag <image>?"}))
    assert problem.images == []
    assert problem.prompt == "The HTML tag <image>?"


def test_marks_without_images_are_named_once(tmp_path, caplog):
    marked = ROW | {"problem": "What is <image>?"}
    load(write_rows(tmp_path, marked | {"image": URI}, marked, marked, ROW))
    [said] = [record.getMessage() for record in caplog.records]
    assert "rows.jsonl:2: <image> and no image, which is read as text (rows like it: 2)" in said


@pytest.mark.parametrize(
    "value",
    [
        Image.fromarray(np.full((2, 2), 0.5, np.float32)),
        Image.fromarray(np.full((2, 2), 200, np.int32)),
    ],
)
def test_a_picture_of_unknown_scale_is_refused_since_it_would_be_black(value):
    for field in ("image", "figure"):
        with pytest.raises(
            InputError, match=rf"data\[0\]: field '{field}'.* of unknown scale; give"
        ):
            rows_of([ROW | {field: value}])


@pytest.mark.parametrize(
    "value",
    [
        Path("a.png"),
        memoryview(png()),
        {"bytes": png()},
        {"bytes": png(), "path": "name.png"},
        {"bytes": base64.b64encode(png()).decode(), "path": "name.png"},
        "data:image/png;base64," + base64.b64encode(png()).decode().rstrip("="),
    ],
)
def test_other_forms_of_an_image_from_python(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png())
    part = [{"role": "user", "content": [{"type": "image", "image": value}]}]
    for row in (ROW | {"image": value}, ROW | {"problem": part}):
        with as_source(rows_of([row])) as source:
            [problem] = load(source)
        assert [content_of(image) for image in problem.images] == [png()]


def test_bytes_of_a_table_are_images_in_any_column_and_part(tmp_path):
    part = [{"role": "user", "content": [{"type": "image", "image": png()}]}]
    for row, fields in (
        (ROW | {"figure": png()}, {"images": "figure"}),
        (ROW | {"figures": [png()]}, {"images": "figures"}),
        (ROW | {"problem": part}, {}),
    ):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        [problem] = load(tmp_path / "rows.parquet", fields=fields)
        assert [content_of(image) for image in problem.images] == [png()]
    pq.write_table(pa.Table.from_pylist([ROW | {"figure": png()}]), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"field 'figure' holds an image.*\{images: figure\}"):
        load(tmp_path / "rows.parquet")


def test_images_in_two_fields_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"rows.jsonl:1: images in two fields, .*in one list"):
        load(write_rows(tmp_path, ROW | {"image": URI, "images": [URI]}))


def test_an_image_file_in_another_field_is_named_once(tmp_path, caplog):
    (tmp_path / "a.png").write_bytes(png())
    row = ROW | {"picture": "a.png", "more": ["a.PNG"], "file": "b.png", "text": "a"}
    load(write_rows(tmp_path, row, row))
    [said] = [record.getMessage() for record in caplog.records]
    assert "rows.jsonl:1: field 'picture' names an image file" in said
    assert said.endswith("data.fields={images: picture}")


def test_the_remedy_for_a_chat_with_images_in_another_field_reads_it(tmp_path):
    chat = [{"role": "user", "content": [{"type": "image", "image": URI}]}]
    file = write_rows(tmp_path, {"answer": "1", "messages": chat})
    with pytest.raises(InputError, match=r"data.fields: \{problem: messages\}"):
        load(file)
    assert load(file, fields={"problem": "messages"})[0].images == [URI]


@pytest.mark.parametrize(
    "extra",
    [
        {"figure": URI},
        {"history": CHAT},
        {"image_1": PIXEL},
        {"figure": {"url": URI}},
        {"figure": [{"image": URI}]},
    ],
)
def test_an_image_in_another_field_is_not_left_out(extra):
    rows = rows_of([ROW | extra])
    with as_source(rows) as source, pytest.raises(InputError, match=r"data\[0\]: field.*image"):
        load(source)


def test_another_field_can_be_named(tmp_path):
    [problem] = load(write_rows(tmp_path, ROW | {"figure": URI}), fields={"images": "figure"})
    assert problem.images == [URI]


@pytest.mark.parametrize("nothing", [{"image": None}, {"images": []}, {"image": ""}])
def test_an_empty_image_field_is_none(tmp_path, nothing):
    assert load(write_rows(tmp_path, ROW | nothing))[0].images == []


def test_the_same_question_about_another_image_is_another_problem(tmp_path):
    one, two = (
        load(write_rows(tmp_path, ROW | {"image": image}))[0]
        for image in (URI, data_uri(png(Image.new("RGB", (2, 2)))))
    )
    assert near_copies([_asked(one)], [_asked(one)])
    assert not near_copies([_asked(one)], [_asked(two)])


def test_curation_refuses_images():
    with pytest.raises(InputError, match="image"):
        parse_problem(ROW | {"image": URI}, "a:1", RowRules(), default_id="a", source="a")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "response": "b", "image": "x.png"},
        {"messages": [*CHAT, {"role": "assistant", "content": "b"}]},
    ],
)
def test_fine_tuning_refuses_images(tmp_path, row):
    file = write_rows(tmp_path, row)
    with pytest.raises(InputError, match=r"rows.jsonl:1.*image"):
        sft_rows(ExamplesConfig(train=str(file)))


def test_a_task_of_verifiers_with_an_image_is_refused():
    """The package's own function would leave it out."""
    message = SimpleNamespace(role="user", content=[SimpleNamespace(type="image_url")])
    with pytest.raises(InputError, match=r"a\[0\]: the task has a part of type image_url"):
        _chat(SimpleNamespace(system_prompt=None, prompt=[message]), "verifiers:a[0]")


def test_a_picture_from_python_is_upright_and_in_colors_that_a_file_holds():
    camera = Image.new("RGB", (4, 2), "red")
    exif = camera.getexif()
    exif[0x0112] = 6  # turned by a quarter
    file = io.BytesIO()
    camera.save(file, "JPEG", exif=exif)
    opened = Image.open(io.BytesIO(file.getvalue()))
    assert decode(as_text(opened)).size == (2, 4)
    assert decode(as_text(Image.new("CMYK", (3, 3)))).mode == "RGB"


@pytest.mark.parametrize("value", ["/9j/" + "A" * 9000, "~nobody-of-that-name/a.png"])
def test_what_is_neither_a_path_nor_a_data_uri_is_refused_shortly(value, tmp_path):
    album = Album(tmp_path, Limits(100, 100, ("PNG",)))
    with pytest.raises(InputError, match="row 3: image .*neither a path nor a data URI") as error:
        album.read(value, "row 3")
    assert len(str(error.value)) < 300


RAW = URI.partition(",")[2]


@pytest.mark.parametrize(
    "value",
    [
        {"bytes": None, "path": "a.png"},
        {"url": URI},
        "DATA:image/png;BASE64," + RAW,
        f"data:image/png;base64,{RAW[:20]}\r\n {RAW[20:]}\n",
        "data:;base64," + RAW.replace("+", "-").replace("/", "_"),
        "data:image/png;name=a.png;base64," + quote(RAW, safe=""),
        f"data:application/octet-stream;base64,{RAW}",
    ],
)
def test_an_image_in_json_may_be_a_record_or_a_uri_in_another_spelling(tmp_path, value):
    (tmp_path / "a.png").write_bytes(png())
    [problem] = load(write_rows(tmp_path, ROW | {"image": value}))
    assert [decode(image).size for image in problem.images] == [(1, 1)]


@pytest.mark.parametrize("value", [0, False, {"bytes": None, "path": None}, [None], [[URI]]])
def test_a_value_that_is_no_image_is_not_left_out(tmp_path, value):
    with pytest.raises(InputError, match=r"rows.jsonl:1: an image (is a|of the list is null)"):
        load(write_rows(tmp_path, ROW | {"image": value}))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"source": {"type": "base64", "data": RAW}}, "an image part with 'source'"),
        ({"file_id": "file-1"}, "an image part with 'file_id'"),
        ({"index": 1}, "an image part with index 1, and image 0 of the row is next"),
        ({"index": 0, "text": None}, None),
    ],
)
def test_a_part_never_shows_another_image_than_its_own(tmp_path, part, says):
    content = [{"type": "image", **part}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "1", "images": [URI]}
    if says is None:
        assert load(write_rows(tmp_path, row))[0].images == [URI]
    else:
        with pytest.raises(InputError, match=rf"rows.jsonl:1: {says}"):
            load(write_rows(tmp_path, row))


def test_a_part_may_hold_base64(tmp_path):
    chat = [{"role": "user", "content": [{"type": "image", "base64": RAW}]}]
    [problem] = load(write_rows(tmp_path, {"prompt": chat, "answer": "1"}))
    assert problem.images == [URI]


def test_the_first_picture_of_a_camera_is_the_photo():
    file = io.BytesIO()
    preview = Image.new("RGB", (8, 8), "blue")
    Image.new("RGB", (16, 16), "red").save(file, "MPO", save_all=True, append_images=[preview])
    photo = decode(data_uri(file.getvalue()), Limits(10**6, 10**6, ("JPEG",)))
    assert photo.size == (16, 16)
    red, _, blue = photo.getpixel((0, 0))
    assert red > 200 and blue < 50


def test_real_numbers_are_refused_since_they_would_be_black():
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(file, "TIFF")
    with pytest.raises(ValueError, match="real numbers"):
        decode(data_uri(file.getvalue()), Limits(10**6, 10**6, ("TIFF",)))


def test_a_long_value_is_shown_shortly(tmp_path):
    with pytest.raises(InputError) as found:
        load(write_rows(tmp_path, ROW | {"image": RAW}))
    assert len(str(found.value)) < 400
