"""load_image: every kind of file and Pillow mode, and every way a file can be bad."""

import io
import os
import struct
import zlib

import pytest
from PIL import Image, ImageOps

from minipop.errors import ImageError
from minipop.processing import image as image_module
from minipop.processing.image import UPRIGHT, load_image

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def gradient(width=37, height=23):
    image = Image.new("RGB", (width, height))
    image.putdata([(i % 256, i * 7 % 256, i * 13 % 256) for i in range(width * height)])
    return image


def pixel(source):
    image = load_image(source)
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


def png_header(width, height):
    """A PNG file that claims a size; its pixels are not there."""
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b""))


# ---------------------------------------------------------------- sources and formats


@pytest.mark.parametrize("format, options", [("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}),
                                             ("TIFF", {"compression": "tiff_lzw"}), ("PPM", {})])
def test_every_source_of_every_lossless_format_gives_the_same_pixels(tmp_path, format, options):
    picture = gradient().quantize(200).convert("RGB")  # GIF has 256 colours
    data = encode(picture, format, **options)
    path = tmp_path / "picture.jpg"  # a wrong suffix does not matter: the content decides
    path.write_bytes(data)
    with open(path, "rb") as file:
        for source in (path, str(path), data, bytearray(data), io.BytesIO(data), file, Image.open(path), picture):
            image = load_image(source)
            assert image.mode == "RGB" and image.tobytes() == picture.tobytes()


def test_jpeg_equals_pillow():
    for mode in ("L", "RGB", "CMYK"):
        data = encode(gradient().convert(mode), "JPEG", quality=90)
        assert load_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_the_pillow_image_passed_in_is_not_changed():
    image = Image.new("RGB", (2, 2), (1, 2, 3))
    image.getexif()[0x0112] = 6
    result = load_image(image)
    result.putpixel((0, 0), (9, 9, 9))
    assert image.getpixel((0, 0)) == (1, 2, 3) and image.getexif()[0x0112] == 6


def test_a_file_object_is_read_from_its_start_whatever_its_position():
    buffer = io.BytesIO()
    gradient().save(buffer, "PNG")
    assert load_image(buffer).size == (37, 23)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (3000, 1), (1, 5000)])
def test_extreme_shapes(size):
    assert load_image(encode(Image.new("RGB", size))).size == size


def test_only_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert Image.open(io.BytesIO(data)).n_frames == 2
        assert pixel(data) == (255, 0, 0), format


@pytest.mark.parametrize("format, options", [("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format, options, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(gradient(3, 2), format, exif=exif, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    for source in (data, Image.open(io.BytesIO(data))):
        image = load_image(source)
        assert image.size == ((2, 3) if orientation >= 5 else (3, 2)) == upright.size
        assert image.tobytes() == upright.tobytes()


def test_strange_exif_is_ignored():
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        assert load_image(encode(gradient(), "JPEG", exif=exif)).size == (37, 23)
    image = gradient()
    image.getexif()[0x0112] = 77
    assert 77 not in UPRIGHT and load_image(image).tobytes() == gradient().tobytes()


# ---------------------------------------------------------------- colours


def test_transparency_is_put_on_white():
    assert pixel(Image.new("RGBA", (64, 64), (255, 0, 0, 0))) == WHITE
    assert pixel(encode(Image.new("RGBA", (64, 64), (255, 0, 0, 0)))) == WHITE
    assert pixel(Image.new("RGBA", (2, 2), (255, 0, 0, 255))) == (255, 0, 0)
    assert pixel(Image.new("RGBA", (2, 2), (255, 0, 0, 128))) == (255, 127, 127)
    assert pixel(Image.new("LA", (2, 2), (0, 0))) == WHITE
    assert pixel(encode(Image.new("LA", (2, 2), (0, 51)))) == (204, 204, 204)
    assert pixel(Image.new("PA", (2, 2), (0, 0))) == WHITE
    assert pixel(Image.new("RGBa", (2, 2), (0, 0, 0, 0))) == WHITE
    assert pixel(Image.new("La", (2, 2), (0, 0))) == WHITE


def test_a_transparent_colour_is_put_on_white():
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([1, 2, 3, 200, 100, 0])
    assert pixel(palette) == (200, 100, 0)
    assert pixel(encode(palette, transparency=1)) == WHITE  # tRNS as a number: one transparent index
    assert pixel(encode(palette, transparency=0)) == (200, 100, 0)
    assert pixel(encode(palette, transparency=b"\xff\x33")) == (244, 224, 204)  # tRNS as bytes: an alpha for each index
    assert pixel(encode(palette, "GIF", transparency=1)) == WHITE
    assert pixel(encode(Image.new("L", (2, 2), 7), transparency=7)) == WHITE
    assert pixel(encode(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3))) == WHITE
    assert pixel(encode(Image.new("I;16", (2, 2), 999), transparency=999)) == WHITE
    assert pixel(encode(Image.new("I;16", (2, 2), 999), transparency=998)) == (4, 4, 4)


def test_grey_of_every_depth():
    assert pixel(Image.new("1", (2, 2), 1)) == WHITE and pixel(encode(Image.new("1", (2, 2), 0))) == BLACK
    assert pixel(Image.new("L", (2, 2), 77)) == (77, 77, 77)
    for value, expected in ((0, 0), (128, 0), (129, 1), (257, 1), (32768, 128), (51400, 200), (65535, 255)):  # v / 257
        for mode in ("I;16", "I;16L", "I;16B"):
            assert pixel(Image.new(mode, (2, 2), value)) == (expected,) * 3
        for data in (encode(Image.new("I;16", (2, 2), value)), encode(Image.new("I;16", (2, 2), value), "TIFF"),
                     encode(Image.new("I", (2, 2), value), "PPM")):
            assert pixel(data) == (expected,) * 3


def test_32_bit_grey():
    assert pixel(Image.new("I", (2, 2), 200)) == (200, 200, 200)
    assert pixel(Image.new("I", (2, 2), 65535)) == WHITE
    assert pixel(encode(Image.new("F", (2, 2), 200.0), "TIFF")) == (200, 200, 200)
    assert pixel(Image.new("F", (2, 2), 0.5)) == (128, 128, 128)
    for mode, value in (("I", -1), ("I", 70000), ("F", -0.5), ("F", 300.0)):
        with pytest.raises(ImageError, match=f"grey values from {value}"):
            load_image(Image.new(mode, (2, 2), value))


def test_other_colour_spaces():
    assert pixel(Image.new("CMYK", (2, 2), (0, 255, 255, 0))) == (255, 0, 0)
    for mode in ("HSV", "YCbCr"):
        colour = pixel(Image.new("RGB", (2, 2), (10, 200, 30)).convert(mode))
        assert all(abs(a - b) <= 2 for a, b in zip(colour, (10, 200, 30)))
    for lightness, grey in ((0, 0), (255, 255), (136, 127)):  # an L* of 53.4 is sRGB's middle grey; 128 is no colour
        image = load_image(encode(Image.new("LAB", (2, 2), (lightness, 128, 128)), "TIFF"))
        assert all(abs(channel - grey) <= 3 for channel in image.getpixel((0, 0)))


# ---------------------------------------------------------------- what cannot be read


def bad(source, match, **options):
    with pytest.raises(ImageError, match=match) as caught:
        load_image(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_that_hold_no_image(tmp_path):
    bad(tmp_path / "none.png", "there is no image file .*none.png")
    bad(tmp_path, "is a folder")
    bad("", "there is no image file ''")
    bad("two\nlines.png", r"there is no image file 'two\\nlines.png'")
    bad("nul\0.png", "cannot be read")
    assert len(bad("x" * 5000, "cannot be read|there is no image file")) < 400
    bad("https://example.com/cat.png", "is an address")
    bad("data:image/png;base64,AAAA", "is an address")
    (tmp_path / "empty.png").touch()
    bad(tmp_path / "empty.png", "empty.png' is empty")
    (tmp_path / "text.png").write_text("hello, I am no picture")
    bad(tmp_path / "text.png", "text.png' is not an image of a known format")
    os.mkfifo(tmp_path / "pipe.png")
    bad(tmp_path / "pipe.png", "is not a regular file")


def test_a_file_without_permission(tmp_path, monkeypatch):
    path = tmp_path / "secret.png"
    path.write_bytes(encode(gradient()))

    def refuse(*_):  # the superuser may read everything, so no mode of the file would do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(image_module, "open", refuse, raising=False)
    bad(path, "secret.png' cannot be read: permission denied")


def test_formats_that_run_other_programs_are_refused(tmp_path):
    path = tmp_path / "picture.png"
    gradient().save(path, "EPS")
    bad(path, "is not an image of a known format")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_cut_files(tmp_path, format):
    data = encode(gradient(), format)
    for length in (1, 7, 40, len(data) // 2, len(data) * 3 // 4):
        path = tmp_path / f"cut{length}"
        path.write_bytes(data[:length])
        bad(path, f"cut{length}'")


def test_damaged_pixels():
    data = bytearray(encode(gradient()))
    start = data.index(b"IDAT") + 10
    data[start:start + 20] = bytes(20)
    bad(bytes(data), "is damaged or cut short")


def test_things_that_are_no_image_source():
    for thing in (None, 3, ["a.png"], {"type": "image"}):
        bad(thing, "an image is a path, bytes, an open binary file or a Pillow image, not")
    bad(io.StringIO("text"), "open it in binary mode")
    bad(b"", "is empty")
    closed = io.BytesIO(encode(gradient()))
    closed.close()
    bad(closed, "cannot be read")
    bad(Image.new("RGB", (0, 5)), "has no pixels: it is 0x5")


def test_the_cap_on_pixels_is_checked_before_decoding(recwarn):
    data = png_header(300, 200)  # decoding it would say that it is damaged
    assert "damaged" in bad(data, "cut short", max_pixels=60000)
    message = bad(data, "300x200 = 60000 pixels", max_pixels=59999)
    assert "59999" in message
    bad(Image.new("L", (11, 10)), "11x10 = 110 pixels, the cap is 100", max_pixels=100)
    bad(png_header(11000, 11000), "11000x11000 = 121000000 pixels, the cap is 100000000")  # where Pillow warns
    bad(png_header(60000, 60000), "3600000000 pixels, the cap is 100000000")  # where Pillow refuses
    bad(png_header(60000, 60000), "3600000000 pixels", max_pixels=10**12)
    assert not recwarn.list
