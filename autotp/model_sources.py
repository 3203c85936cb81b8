"""Where models come from: torchvision, timm, a transformers config, the user's own factory.

Each source checks its name at once and returns a function without arguments that builds the model.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from autotp.errors import AutotpError, SpecError

Constructor = Callable[[], Any]


def guarded(spec: str, constructor: Constructor) -> Any:
    """Run `constructor`; whatever it raises becomes one line that says where in whose code."""
    try:
        return constructor()
    except (AutotpError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(f"{spec}: building the model raised {_one_line(error)}") from error


def torchvision(name: str) -> Constructor:
    """A model of torchvision's registry, without weights."""
    models = _require("torchvision.models", "torchvision")
    known = models.list_models()
    if name not in known:
        raise SpecError(f"torchvision has no model {name!r}.{_nearest(name, known)}")
    builder = models.get_model_builder(name)
    # Detection and segmentation models would otherwise fetch weights for their backbone.
    wanted = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    return lambda: builder(**wanted)


def timm(name: str) -> Constructor:
    """A model of timm's registry, without weights."""
    library = _require("timm", "timm")
    if not library.is_model(name.split(".")[0]):
        raise SpecError(f"timm has no model {name!r}.{_nearest(name, library.list_models())}")
    return lambda: library.create_model(name, pretrained=False)


def hf(path: str) -> Constructor:
    """A transformers model from a local config; weights are not read and nothing is fetched."""
    transformers = _require("transformers", "transformers")
    file, values = _read_config(path)
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError(f'{file}: has no "model_type", so it is not the config of a transformers model.')
    if model_type not in mapping:
        own = 'It needs code of its own ("auto_map"), which is not run:' if "auto_map" in values else "If it is yours,"
        raise SpecError(
            f"{file}: transformers {transformers.__version__} does not know model_type {model_type!r}. {own} "
            f"build it in a factory and pass file.py:factory.{_nearest(model_type, mapping)}"
        )

    def construct() -> Any:
        with _no_network():
            config = mapping[model_type].from_dict(values)
            if getattr(config, "use_pretrained_backbone", False):
                config.use_pretrained_backbone = False
            return _hf_class(transformers, config, values)._from_config(config)

    return construct


def factory(target: str, attribute: str) -> Constructor:
    """A class or function in the user's module `target` (a dotted name or a .py file)."""
    spec = f"{target}:{attribute}" if attribute else target
    module = _load_module(target, spec)
    if not attribute:
        raise SpecError(f"{spec}: name the factory too, as {spec}:NAME.{_offers(module)}")
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise SpecError(f"{spec}: {target} has no {attribute!r}.{_nearest(attribute, _callables(module))}")
        value = getattr(value, part)
    if not callable(value) or isinstance(value, _module_type()):
        kind = "a built model" if isinstance(value, _module_type()) else f"a {type(value).__name__}"
        raise SpecError(
            f"{spec}: is {kind}, not a factory. Wrap it in a function without arguments that returns the model."
        )
    if missing := _required(value):
        raise SpecError(
            f"{spec}: needs arguments ({', '.join(missing)}), but a factory is called without any. "
            f"Add a function like `def make(): return {attribute}({', '.join(f'{m}=...' for m in missing)})` "
            f"and pass {target}:make."
        )
    return value


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpecError(f"{extra} is not installed ({error}). Install it: pip install 'autotp[{extra}]'") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(near)}." if near else ""


def _read_config(path: str) -> tuple[Path, dict[str, Any]]:
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
        if not file.is_file():
            found = ", ".join(sorted(p.name for p in Path(path).expanduser().glob("*.json"))) or "no .json file"
            raise SpecError(f"{path}: holds no config.json (it holds {found}).")
    if not file.is_file():
        raise SpecError(
            f"{path}: no such file or folder. hf: takes a local folder or config.json; nothing is downloaded."
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise SpecError(f"{file}: holds a JSON {type(values).__name__}, not a config object.")
    return file, values


def _hf_class(transformers: Any, config: Any, values: dict[str, Any]) -> Any:
    """The class that `architectures` names, else the one that the auto classes choose for a causal LM, ... , base."""
    for name in values.get("architectures") or ():
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)
    auto = transformers.models.auto.modeling_auto
    first = ["SEQ_TO_SEQ_CAUSAL_LM"] if getattr(config, "is_encoder_decoder", False) else ["CAUSAL_LM"]
    order = [*first, "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "IMAGE_CLASSIFICATION"]
    for task in order:
        mapping = getattr(auto, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            return mapping[type(config)]
    if type(config) in auto.MODEL_MAPPING:
        chosen = auto.MODEL_MAPPING[type(config)]
        return chosen[0] if isinstance(chosen, (tuple, list)) else chosen
    raise SpecError(
        f'transformers has no model for {type(config).__name__} and "architectures" names none that it knows.'
    )


@contextmanager
def _no_network() -> Iterator[None]:
    """Make the hub client refuse to connect: a config may name a backbone that lives there."""
    constants = _require("huggingface_hub.constants", "transformers")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _load_module(target: str, spec: str) -> ModuleType:
    try:
        if target.endswith(".py"):
            return _import_file(Path(target).expanduser())
        with _on_path(Path.cwd()):
            return importlib.import_module(target)
    except FileNotFoundError as error:
        if error.filename and Path(error.filename) == Path(target).expanduser():
            raise SpecError(f"{spec}: no such file: {target}") from None
        raise SpecError(f"{spec}: importing {target} raised {_one_line(error)}") from error
    except ModuleNotFoundError as error:
        if error.name and (target == error.name or target.startswith(error.name + ".")):
            raise SpecError(
                f"{spec}: there is no module {error.name!r} here. For a file write path/to/file.py:factory."
            ) from None
        raise SpecError(f"{spec}: importing {target} raised {_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise SpecError(f"{spec}: importing {target} raised {_one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    name = f"autotp_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    with _on_path(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _module_type() -> type:
    from torch import nn

    return nn.Module


def _required(value: Any) -> list[str]:
    """Names of the parameters that a call without arguments would miss."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _callables(module: ModuleType) -> list[str]:
    """Functions and classes defined in `module` itself."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]


def _offers(module: ModuleType) -> str:
    names = [name for name in _callables(module) if not _required(getattr(module, name))]
    return f" It defines {', '.join(names)}." if names else ""


def _one_line(error: BaseException) -> str:
    """``ValueError: text (model.py:12 in make)``: the deepest frame outside installed packages, else the deepest."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).parent
    theirs = [f for f in frames if Path(f.filename).parent != own and "importlib" not in f.filename]
    users = [f for f in theirs if "site-packages" not in f.filename]
    frame = next(reversed(users or theirs), None)
    where = f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})" if frame else ""
    if isinstance(error, SyntaxError):
        where = f" ({Path(error.filename or '?').name}:{error.lineno})"
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
