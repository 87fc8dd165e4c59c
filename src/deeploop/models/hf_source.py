"""Write the source of a module, and of the deeploop modules that it imports, as one flat folder.

transformers runs the code in a model's folder (`trust_remote_code=True`), but only files that lie side by
side and import each other relatively. So deeploop/nn/cache.py becomes deeploop_nn_cache.py, and
`from deeploop.nn.cache import …` becomes `from .deeploop_nn_cache import …`.
"""

import os
import re
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
IMPORT = re.compile(r"^( *)from (deeploop\.[\w.]+) import", re.MULTILINE)


def write_source(folder: str | os.PathLike[str], module: str, file: str) -> str:
    """Write `module`, defined in `file`, and the deeploop modules it needs into the folder; return its name.

    Its imports must name modules, not packages: a package's `__init__` would pull in everything. From a
    folder that was written this way, the files are copied unchanged.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not module.startswith("deeploop."):
        for path in Path(file).parent.glob("deeploop_*.py"):
            shutil.copyfile(path, folder / path.name)
        return Path(file).stem
    needed = [module]
    for name in needed:  # grows on the way
        path = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        needed += {match[2] for match in IMPORT.finditer(text)} - set(needed)
        flat = IMPORT.sub(lambda match: f"{match[1]}from .{_flat(match[2])} import", text)
        header = f"# From deeploop, Apache-2.0: {'/'.join(name.split('.'))}.py, with its imports made flat.\n"
        (folder / f"{_flat(name)}.py").write_text(header + flat, encoding="utf-8")
    return _flat(module)


def _flat(module: str) -> str:
    return module.replace(".", "_")
