"""Printed digits: a stand-in for MNIST, drawn on your machine when MNIST cannot be downloaded.

Every image is a digit from one of the fonts that Matplotlib ships, turned, slanted, stretched, bent, thickened,
faded and speckled at random. All arithmetic is on integers, from the fonts' outlines (integers too) to the last
pixel, and NumPy never changes the stream of its `RandomState`: the same seed gives the same bytes everywhere.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

# NumPy and Matplotlib are imported where they are used: who only reads the finished files needs neither.

VERSION = 2  # part of the name of the folder that caches the images: raise it when they change

# The fonts of Matplotlib 3.8 and later that have digits of one height on one line, so neither cmmi10 (old-style
# figures) nor cmti10 (new in 3.11).
FONTS = [
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmtt10"),
]
WEIGHTS = 3  # each glyph is drawn this often, each time with a fatter pen
CANVAS = 128  # and on 128 x 128 dots,
DOTS = 4  # of which 4 x 4 make a pixel
EDGE = [0, 1, -2, -1]  # rows and columns of the final image that stay empty


def outline(font, character):
    """A glyph's closed outlines as line segments, int64 [segments, 2 ends, x and y] in 1/64 of a font unit."""
    import numpy as np
    from matplotlib import ft2font

    # Unscaled, an outline is in the integers of the font's file, whatever the version of FreeType.
    try:
        unscaled = ft2font.LoadFlags.NO_SCALE | ft2font.LoadFlags.IGNORE_TRANSFORM
    except AttributeError:  # Matplotlib before 3.10 takes FreeType's own numbers
        unscaled = 1 | 2048
    font.load_char(ord(character), flags=unscaled)
    points, codes = font.get_path()
    points = (points * 64).astype(np.int64)  # Matplotlib divides FreeType's integers by 64

    segments, i = [], 0
    t = np.arange(9)[:, None]  # a curve becomes eight chords
    while i < len(points):
        if codes[i] == 1:  # move to
            start = here = points[i]
            i += 1
            continue
        if codes[i] == 3:  # quadratic curve: control point and end
            control, end = points[i : i + 2]
            chords = (8 - t) ** 2 * here + 2 * t * (8 - t) * control + t**2 * end
            i += 2
        else:  # line, or back to the start
            end = points[i] if codes[i] == 2 else start
            chords = 64 * np.array([here, end])
            i += 1
        segments.append(np.stack([chords[:-1], chords[1:]], axis=1))
        here = end
    return np.concatenate(segments)


def fill(segments):
    """The dots inside an outline, bool [CANVAS, CANVAS]; the glyph's longer side takes 20 pixels, as in MNIST."""
    import numpy as np

    low, high = segments.min((0, 1)), segments.max((0, 1))
    # To 1/256 of a dot, y downwards, the middle of the glyph on the middle of the canvas.
    points = (2 * segments - low - high) * np.array([1, -1]) * (20 * DOTS * 128) // (high - low).max() + CANVAS * 128
    (x0, y0), (x1, y1) = points.transpose(1, 2, 0)[..., None]
    y = np.arange(CANVAS) * 256 + 128
    segment, row = np.nonzero((y0 <= y) != (y1 <= y))
    x0, y0, x1, y1 = (end[segment, 0] for end in (x0, y0, x1, y1))
    column = (x0 + (y[row] - y0) * (x1 - x0) // (y1 - y0) + 127) // 256
    # Inside is where the outline has wound round a dot: add up the crossings to its left, by their direction.
    winding = np.zeros((CANVAS, CANVAS), np.int64)
    np.add.at(winding, (row, column), np.where(y1 > y0, 1, -1))
    return winding.cumsum(1) != 0


def glyph_images():
    """Every digit in every font and weight as pixels would see it: uint8 [10, len(FONTS) * WEIGHTS, CANVAS**2]."""
    import matplotlib
    import numpy as np
    from matplotlib.ft2font import FT2Font

    inside = np.zeros((WEIGHTS, 10, len(FONTS), CANVAS, CANVAS), np.uint8)
    for f, name in enumerate(FONTS):
        font = FT2Font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")))
        for digit in range(10):
            inside[0, digit, f] = fill(outline(font, str(digit)))
    for thin, fat in zip(inside, inside[1:]):  # a pen that reaches one dot further in each direction
        fat[:] = thin | np.roll(thin, 1, -1) | np.roll(thin, -1, -1) | np.roll(thin, 1, -2) | np.roll(thin, -1, -2)
    grey = inside.astype(np.int16)
    for axis in (-1, -2):  # how many of the DOTS x DOTS dots around are inside
        grey = sum(np.roll(grey, step, axis) for step in range(-(DOTS // 2), DOTS // 2))
    grey = np.minimum(grey * (256 // DOTS**2), 255).astype(np.uint8)
    return np.ascontiguousarray(grey.transpose(1, 2, 0, 3, 4)).reshape(10, -1, CANVAS**2)


def wave(phase):
    """A wave through integers from -64 to 64 with period 256: a sine's halves made of parabolas."""
    import numpy as np

    half = (phase & 127) - 64
    return (64 - half * half // 64) * np.where(phase & 128, -1, 1)


def draw(glyphs, labels, random):
    """Images of `labels` ([n]), each a random glyph of that digit, warped at random: uint8 [n, 28, 28]."""
    import numpy as np

    n = len(labels)
    variant = random.randint(glyphs.shape[1], size=n, dtype=np.int32)
    glyph = ((labels * glyphs.shape[1] + variant) * CANVAS**2)[:, None, None]  # its place in `glyphs`
    phase = random.randint(256, size=(6, n, 1), dtype=np.int32)
    speckle = np.frombuffer(random.bytes(n * 28 * 28), np.uint8).reshape(n, 28, 28)
    # All else comes from numbers between -256 and 256, most of them near 0.
    bell = random.randint(-64, 65, size=(4, 19, n, 1), dtype=np.int32).sum(0, dtype=np.int32)
    width, height, turn, slant, more_ink, fading, speckling = bell[:7]
    bend, length, fade_across, fade_down = bell[7:11], (bell[11:15] + 256) // 100 + 3, bell[15] // 64, bell[16] // 64

    # Where on the canvas does a pixel look? Distances in half pixels, places in 1/256 of a dot: 512 to a half pixel.
    steps = 2 * np.arange(28, dtype=np.int32) - 27
    waves = (wave(phase[:4] + length * steps) - wave(phase[:4])) * bend * 5 // 16  # they leave the middle in place
    x_by_column = (640 + width * 5 // 4) * steps + waves[0] // 4
    x_by_row = ((slant + turn) * 3 // 2) * steps + waves[1]
    y_by_column = (-turn * 3 // 2) * steps + waves[2]
    y_by_row = (640 + height) * steps + waves[3] // 4
    middle = (bell[17:19] // 10 + CANVAS // 2) * 256
    images = np.empty((n, 28, 28), np.uint8)
    todo = np.arange(n)
    while len(todo):
        x = (x_by_column + middle[0])[todo, None, :] + x_by_row[todo, :, None] >> 8  # that is, divided by 256
        y = (y_by_column + middle[1])[todo, None, :] + y_by_row[todo, :, None] >> 8
        ink = glyphs.ravel()[glyph[todo] + y.clip(0, CANVAS - 1) * CANVAS + x.clip(0, CANVAS - 1)]
        images[todo] = ink
        # Where ink comes near the frame, some may be beyond it: look again, from further away.
        todo = todo[ink[:, EDGE].any((1, 2)) | ink[:, :, EDGE].any((1, 2))]
        for place in (x_by_column, x_by_row, y_by_column, y_by_row):
            place[todo] = place[todo] * 9 // 8

    # More ink or less, fading along a wave, speckled: in 1/256, never so little that the digit cannot be seen.
    across, along = wave(phase[4] + fade_across * steps)[:, None, :], wave(phase[5] + fade_down * steps)[:, :, None]
    faded = np.maximum(across + along, 0) * (abs(fading) * 5)[:, :, None] >> 8
    ink = images * np.maximum(256 + more_ink[:, :, None] // 2 - faded, 128) >> 8
    ink -= ink * (speckle * np.minimum(abs(speckling) * 2, 224)[:, :, None] >> 8) >> 8
    return np.minimum(ink, 255).astype(np.uint8)


def printed_digits(counts=(60_000, 10_000), seed=0):
    """For each count a pair of images (uint8 [count, 28, 28], white on black) and labels (uint8 [count]): all ten
    digits equally often, shuffled, the same bytes for the same arguments on every machine."""
    import numpy as np

    glyphs = glyph_images()
    sets = []
    for number, count in enumerate(counts):
        labels = np.random.RandomState([seed, number]).permutation(np.arange(count, dtype=np.int32) % 10)
        chunks = np.split(labels, range(500, count, 500))  # so few that they stay in the processor's cache
        randoms = [np.random.RandomState([seed, number, chunk]) for chunk in range(len(chunks))]
        with ThreadPoolExecutor() as pool:  # NumPy computes outside Python's lock
            images = np.concatenate([*pool.map(draw, repeat(glyphs), chunks, randoms)])
        sets.append((images, labels.astype(np.uint8)))
    return sets
