"""Which letters pictures can have: the PNG files are drawn with the fonts of this machine, and no others."""

import re
from collections.abc import Iterable
from pathlib import Path

PNG_FONTS = (
    "Noto Sans, DejaVu Sans, Liberation Sans, Noto Sans CJK SC, Noto Sans SC, Source Han Sans SC, "
    "WenQuanYi Micro Hei, WenQuanYi Zen Hei, Droid Sans Fallback, Arial, sans-serif"
)
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_CHINESE = re.compile(
    r"cjk|wqy|wenquanyi|droidsansfallback|sourcehan|notos(?:ans|erif)sc|simsun|simhei|msyh|uming|ukai"
)


def has_chinese(folders: Iterable[str] = _FOLDERS) -> bool:
    """Whether a font with Chinese letters is installed; told by the names of the files.

    Args:
        folders: where fonts lie.
    """
    for folder in folders:
        root = Path(folder).expanduser()
        if root.is_dir() and any(_CHINESE.search(path.name.lower()) for path in root.rglob("*.[ot]t[fc]")):
            return True
    return False
