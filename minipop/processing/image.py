"""Decoding: what a user has (a file, bytes, a Pillow image) becomes an upright RGB picture, or a line that says why it cannot."""

import io
import os
import re
import stat
import warnings
from typing import Any, BinaryIO

from PIL import Image

from ..errors import ImageError

# What people really have, decoded by code that runs nothing: no EPS (it starts ghostscript), no plug-in for some rare container.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")

# 10,000 x 10,000: above a large camera's picture, below what a hostile header asks for. Decoding takes about 4 bytes a pixel.
MAX_PIXELS = 100_000_000

EXIF_ORIENTATION = 0x0112
# EXIF orientation -> what turns the stored pixels upright (1 is upright already).
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_image(source: Any, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one picture to an upright, opaque Pillow image of mode RGB.

    source: a path, the bytes of a file, an open binary file, or a Pillow image (which is not changed).
    max_pixels: most pixels (width x height) to decode; read from the header, so that a picture above it costs no memory.

    The rules, whatever the source:
    - the EXIF orientation is applied; of an animation the first frame counts; ICC colour profiles are ignored
    - transparency (an alpha channel, or a transparent colour of a palette, GIF or PNG) is put on white
    - 16-bit grey is scaled to 8 bits, v * 255 / 65535
    - 32-bit grey has no range of its own: integers above 255 count as 16-bit, floats of at most 1 are scaled by 255, other values
      up to 255 are taken as they are, and values outside are refused

    Raises ImageError with one line that names the file and what is wrong with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata, and of sizes above its own cap: we refuse or we read
        return _load(source, max_pixels)


def _load(source: Any, max_pixels: int) -> Image.Image:
    if isinstance(source, Image.Image):
        name = _shorten(source.filename) if getattr(source, "filename", "") else "the image in memory"
        return _decode(source, name, max_pixels)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _open(io.BytesIO(source), "the image in memory", max_pixels)
    if isinstance(source, (str, os.PathLike)):
        name = _shorten(os.fspath(source))
        with _open_path(source, name) as file:
            return _open(file, name, max_pixels)
    if hasattr(source, "read"):
        name = f"the image file {_shorten(source.name)}" if isinstance(getattr(source, "name", None), str) else "the image file"
        return _open(io.BytesIO(_read_all(source, name)), name, max_pixels)
    raise ImageError(f"an image is a path, bytes, an open binary file or a Pillow image, not {type(source).__name__}")


def _shorten(path: Any) -> str:
    """The path on one line: quoted, control characters escaped, and cut when somebody passed a picture's text as its path."""
    text = repr(path)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-20:]}"


def _open_path(source: Any, name: str) -> BinaryIO:
    path = os.fspath(source)
    if isinstance(path, str) and re.match(r"(https?|data|file):", path):
        raise ImageError(f"{name} is an address, not a file: download the image and give its path")
    try:
        mode = os.stat(path).st_mode
        # Opening a pipe or a device could block for ever, so only a regular file is opened.
        file = open(path, "rb") if stat.S_ISREG(mode) else None
    except FileNotFoundError:
        raise ImageError(f"there is no image file {name}") from None
    except PermissionError:
        raise ImageError(f"{name} cannot be read: permission denied") from None
    except OSError as error:
        raise ImageError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL character in the path
        raise ImageError(f"{name} cannot be read: {_one_line(error)}") from None
    if file is None:
        raise ImageError(f"{name} is a folder, not an image file" if stat.S_ISDIR(mode) else f"{name} is not a regular file")
    return file


def _read_all(file: Any, name: str) -> bytes:
    try:
        if hasattr(file, "seekable") and file.seekable():
            file.seek(0)
        data = file.read()
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be read: {_one_line(error)}") from None
    if not isinstance(data, bytes):
        raise ImageError(f"{name} gives {type(data).__name__}, not bytes: open it in binary mode")
    return data


def _open(file: BinaryIO, name: str, max_pixels: int) -> Image.Image:
    """Header of an open, seekable binary file -> decoded RGB image."""
    if file.seek(0, io.SEEK_END) == 0:
        raise ImageError(f"{name} is empty (0 bytes)")
    file.seek(0)
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:  # Pillow's own cap, twice MAX_IMAGE_PIXELS; it names the number of pixels
        pixels = re.search(r"\d+ pixels", str(error))
        pixels = pixels[0] if pixels else "too many pixels"
        raise ImageError(f"{name} has {pixels}, the cap is {max_pixels}: scale it down first") from None
    except Image.UnidentifiedImageError:
        raise ImageError(f"{name} is not an image of a known format ({', '.join(FORMATS)}), or its header is damaged") from None
    except Exception as error:  # a damaged header surfaces as almost any exception, depending on the format
        raise ImageError(f"{name} has a damaged header: {_one_line(error)}") from None
    with image:
        return _decode(image, name, max_pixels)


def _decode(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    width, height = image.size
    if width == 0 or height == 0:
        raise ImageError(f"{name} has no pixels: it is {width}x{height}")
    if width * height > max_pixels:
        raise ImageError(f"{name} is {width}x{height} = {width * height} pixels, the cap is {max_pixels}: scale it down first")
    try:
        image.load()
    except Exception as error:  # as above: OSError, SyntaxError, ValueError, struct.error, ... all mean that the data is bad
        raise ImageError(f"{name} is damaged or cut short: {_one_line(error)}") from None
    orientation = _orientation(image)  # after load(): PNG may keep it behind the pixels, and Pillow turns TIFF files by itself
    try:
        rgb = _to_rgb(image, name)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"{name} has colours that cannot be turned into RGB (mode {image.mode}): {_one_line(error)}") from None
    return rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb


def _orientation(image: Image.Image) -> int | None:
    try:
        return image.getexif().get(EXIF_ORIENTATION)
    except Exception:  # a picture with broken metadata is still a picture
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---------------------------------------------------------------- colours


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Any Pillow mode -> a new opaque RGB image."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _grey16(image).convert("RGB")
    if mode == "I":
        return _grey_int32(image, name).convert("RGB")
    if mode == "F":
        return _grey_float(image, name).convert("RGB")
    if mode == "LAB":
        return _lab_to_rgb(image)
    if mode in ("La", "RGBa"):  # alpha already multiplied into the colours
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _grey16(image: Image.Image) -> Image.Image:
    """16-bit grey -> L by table; Pillow's own conversion would clip everything above 255 to white."""
    table = [round(value * 255 / 65535) for value in range(65536)]
    transparent = image.info.get("transparency")  # PNG: the one grey value that is transparent
    if isinstance(transparent, int) and 0 <= transparent < 65536:
        table[transparent] = 255
    return image.convert("I").point(table, "L")


def _grey_int32(image: Image.Image, name: str) -> Image.Image:
    low, high = image.getextrema()
    if low < 0 or high > 65535:
        raise ImageError(f"{name} has 32-bit grey values from {low} to {high}: scale them to 0..255 (8 bits) first")
    # Pillow decodes 16-bit PPM, and in older versions 16-bit PNG, to mode I.
    if high > 255 or image.format in ("PNG", "PPM"):
        return _grey16(image)
    return image.convert("L")


def _grey_float(image: Image.Image, name: str) -> Image.Image:
    low, high = image.getextrema()
    if not (0 <= low and high <= 255):
        raise ImageError(f"{name} has floating point grey values from {low} to {high}: scale them to 0..1 or 0..255 first")
    if high <= 1:
        image = image.point(lambda value: value * 255 + 0.5)  # convert("L") cuts the fraction off
    return image.convert("L")


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms  # needs littlecms, which a Pillow built from source may lack

    to_rgb = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
    return ImageCms.applyTransform(image, to_rgb)
