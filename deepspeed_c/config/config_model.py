"""``DeepSpeedConfigModel``: a class of configuration keys with types and defaults. It checks values and dumps them.

DeepSpeed's class is a model of pydantic. This class has the parts of its interface that programs use, without pydantic.
"""

from __future__ import annotations

import copy
import enum
import json
import sys
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from typing_extensions import Self

from deepspeed_c.config.convert import convert, kind_of, thaw, thawed_kind
from deepspeed_c.config.keys import Section
from deepspeed_c.config.nearest import nearest
from deepspeed_c.config.schema import fields_of, info_of
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.logging import logger

__all__ = ["DeepSpeedConfigModel", "Field", "get_config_default"]


class Field:
    """One key of a model, as in ``Model.model_fields``. As the value of a class attribute, a Field gives the key more
    than a default.

    Args:
        default: the value if the key is missing; ``...`` for a required key.
        default_factory: makes the default anew for each object.
        alias: the key's name in a configuration, if it differs from the attribute's name. Both names are read.
        ge, gt, le, lt: bounds of a number.
        json_schema_extra: the entries ``deprecated``, ``new_param`` and others of a deprecated key.
        exclude: whether dumps leave it out.
    """

    def __init__(
        self,
        default: Any = ...,
        *,
        default_factory: Callable[[], Any] | None = None,
        alias: str | None = None,
        ge: float | None = None,
        gt: float | None = None,
        le: float | None = None,
        lt: float | None = None,
        json_schema_extra: dict[str, Any] | None = None,
        exclude: bool = False,
    ) -> None:
        self.default, self.default_factory, self.alias = default, default_factory, alias
        self.bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
        self.json_schema_extra, self.exclude = json_schema_extra or {}, exclude
        self.annotation: Any = Any

    def is_required(self) -> bool:
        return self.default is ... and self.default_factory is None

    def get_default(self) -> Any:
        return copy.deepcopy(self.default) if self.default_factory is None else self.default_factory()

    def __repr__(self) -> str:
        return f"Field(annotation={kind_of(self.annotation)}, default={self.default!r})"


def _as_field(value: Any) -> Field:
    """The field for the value of a class attribute: a ``Field`` of this module, a field of pydantic, or a plain
    default."""
    if isinstance(value, Field):
        return value
    if type(value).__name__ == "FieldInfo":  # of pydantic: each bound is an object with one attribute
        bounds = {
            key: getattr(each, key) for each in value.metadata for key in ("ge", "gt", "le", "lt") if hasattr(each, key)
        }
        is_required = value.is_required()
        return Field(
            ... if is_required or value.default_factory else value.default,
            default_factory=value.default_factory,
            alias=value.alias,
            json_schema_extra=value.json_schema_extra,
            exclude=bool(value.exclude),
            **bounds,
        )
    return Field(value)


class _Fields:
    """The attribute ``model_fields`` of the class and its objects: fields by attribute name, in the order of
    definition."""

    def __get__(self, instance: Any, owner: type[DeepSpeedConfigModel]) -> dict[str, Field]:
        return owner._resolved_fields()


class DeepSpeedConfigModel:
    """The base of DeepSpeed's configuration classes. A subclass declares its keys as annotated attributes.

    Values are checked and converted as pydantic does without strictness: "3" and 5e8 are integers, and "yes" is a
    boolean. Members of enumerations are stored as their values. A key with the value "auto" counts as not given, unless
    ``strict``. Objects compare by their values. Attributes may be set, with the same checks. An unknown key is an
    error. Validators of pydantic are not run: defining one in a subclass raises FeatureError.

    Args:
        strict: "auto" is an ordinary value.
        data: the keys by their names or aliases.

    Raises:
        ConfigError: unknown keys, values of a wrong type or out of bounds, missing required keys.
    """

    model_fields = _Fields()
    _own_fields: typing.ClassVar = {}
    _all_fields: typing.ClassVar = {}
    _names: typing.ClassVar = {}

    def __init_subclass__(
        cls, section: type[Section] | None = None, prefix: str = "", without: Container[str] = (), **options: Any
    ) -> None:
        """``section`` is a class that provides keys, types and defaults, except the keys in ``without``. They come
        before the keys of this class. The name of an attribute is the key's name without ``prefix``.
        """
        super().__init_subclass__(**options)
        own: dict[str, Field] = {}
        if section is not None:
            for each in fields_of(section).values():
                if each.name in without:
                    continue
                name = each.name.removeprefix(prefix)
                own[name] = Field(thaw(each.default), alias=each.name if each.name != name else None)
                own[name].annotation = thawed_kind(each.hint)
        for name, value in list(vars(cls).items()):
            if type(value).__name__ == "PydanticDescriptorProxy":
                raise FeatureError(
                    f"{cls.__name__}.{name} is a validator of pydantic, which this class does not run",
                    where="DeepSpeedConfigModel",
                    fix="derive the class from pydantic.BaseModel, or check in __init__",
                )
        for name in vars(cls).get("__annotations__", {}):
            if name.startswith("_") or "ClassVar" in str(vars(cls)["__annotations__"][name]):
                continue
            own[name] = _as_field(vars(cls).get(name, ...))
            own[name].annotation = None  # evaluated at the first use, with the class's names
            if name in vars(cls):
                delattr(cls, name)
        cls._own_fields = own
        # The annotations of a class inside a function may name other local classes. They are evaluated later, so keep
        # the scope.
        scope = sys._getframe(1)
        cls._names = {} if scope.f_locals is scope.f_globals else dict(scope.f_locals)

    @classmethod
    def _resolved_fields(cls) -> dict[str, Field]:
        if "_all_fields" in vars(cls):
            return cls._all_fields
        found: dict[str, Field] = {}
        for base in reversed(cls.__mro__):
            own = vars(base).get("_own_fields", {})
            if any(field.annotation is None for field in own.values()):
                hints = typing.get_type_hints(base, localns=vars(base)["_names"], include_extras=True)
                for name, field in own.items():
                    field.annotation = hints[name] if field.annotation is None else field.annotation
            found.update(own)
        cls._all_fields = found
        return found

    @classmethod
    def _is_unfilled(cls, key: str, value: Any) -> bool:
        """Whether ``value`` is an "auto" that another program was to fill, and no ordinary value of the key."""
        if not (isinstance(value, str) and value == "auto"):
            return False
        name = cls._names_by_key().get(key)
        info = None if name is None else info_of(cls.model_fields[name].annotation)
        return info is None or info.auto != "value"

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if not self._is_unfilled(key, value)}
        fields = self.model_fields
        by_key = self._names_by_key()
        if unknown := sorted(data.keys() - by_key.keys()):
            raise self._unknown(unknown, by_key)
        given: dict[str, Any] = {}
        for key, value in data.items():
            name = by_key[key]
            if name in given and fields[name].alias == key or name not in given:
                given[name] = value  # an alias wins over its attribute's name
        object.__setattr__(self, "model_fields_set", set(given))
        for name, field in fields.items():
            if name not in given and field.is_required():
                raise ConfigError("must be given", where=self._where(name), fix="write the key")
            setattr_unchecked(self, name, self._checked(name, given[name] if name in given else field.get_default()))
        self._replace_old_keys()
        self._check()

    def _check(self) -> None:
        """Check rules that involve several keys. A subclass may override this."""

    @classmethod
    def _names_by_key(cls) -> dict[str, str]:
        """The name of an attribute by each key that is read as it: the name itself, and its alias."""
        return {key: name for name, field in cls.model_fields.items() for key in (name, field.alias) if key}

    @classmethod
    def _unknown(cls, names: list[str], known: Iterable[str]) -> ConfigError:
        """The error about unknown keys. A subclass may override this."""
        near = nearest(names[0], known)
        return ConfigError(
            f"{', '.join(names)}: no such key" + ("s" if len(names) > 1 else ""),
            where=cls.__name__,
            fix=f"did you mean {' or '.join(near)}?" if near else f"the keys are {', '.join(known)}",
        )

    @classmethod
    def _where(cls, name: str) -> str:
        """The place of a key in errors. A subclass may override this."""
        return f"{cls.__name__}.{cls.model_fields[name].alias or name}"

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        field = cls.model_fields[name]
        return convert(value, field.annotation, cls._where(name), field.bounds)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.model_fields:
            raise ConfigError(
                f"has no key {name}", where=type(self).__name__, fix=f"the keys are {', '.join(self.model_fields)}"
            )
        setattr_unchecked(self, name, self._checked(name, value))
        self.model_fields_set.add(name)

    def _replace_old_keys(self) -> None:
        for name, field in self.model_fields.items():
            extra = field.json_schema_extra
            if not extra.get("deprecated") or name not in self.model_fields_set:
                continue
            new = extra.get("new_param", "")
            self._report_old_key(name, new, extra.get("deprecated_msg", ""))
            if not new or not extra.get("set_new_param", True):
                continue
            *path, last = new.split(".")
            owner = reduce(getattr, path, self)
            value = extra.get("new_param_fn", lambda value: value)(getattr(self, name))
            if last in owner.model_fields_set and getattr(owner, last) != value:
                raise ConfigError(
                    f"{name} and {new} are both given, with different values",
                    where=type(self).__name__,
                    fix=f"keep {new}, remove {name}",
                )
            del self.__dict__[name]
            setattr(owner, last, value)

    def _report_old_key(self, name: str, new: str, message: str) -> None:
        """Report an old key that was given. A subclass may override this."""
        logger.warning(
            "%s.%s is an old key%s%s",
            type(self).__name__,
            name,
            f", use {new} instead" if new else "",
            f". {message}" if message else "",
        )

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Any = None,
        exclude: Any = None,
        by_alias: bool = False,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """The values by attribute name, or with ``by_alias`` by the key's name in a configuration. Nested models become
        dictionaries.

        ``mode="json"`` converts paths and similar values to text. A dtype is text in both modes.
        """
        dump: dict[str, Any] = {}
        options = {"mode": mode, "by_alias": by_alias, "exclude_unset": exclude_unset}
        options |= {"exclude_defaults": exclude_defaults, "exclude_none": exclude_none}
        for name, value in self:
            field = self.model_fields[name]
            if (
                field.exclude
                or (include is not None and name not in include)
                or (exclude is not None and name in exclude)
            ):
                continue
            if (exclude_unset and name not in self.model_fields_set) or (exclude_none and value is None):
                continue
            if exclude_defaults and not field.is_required() and value == self._checked(name, field.get_default()):
                continue
            dump[field.alias if by_alias and field.alias else name] = _dumped(value, options)
        return dump

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """``model_dump(mode="json")`` as text."""
        separators = (",", ":") if indent is None else None
        return json.dumps(self.model_dump(mode="json", **options), indent=indent, separators=separators)

    dict = model_dump
    json = model_dump_json

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """An object of this class from a mapping, or ``obj`` itself if it is one."""
        return obj if isinstance(obj, cls) else cls(**obj)

    parse_obj = model_validate

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with ``update`` put in unchecked."""
        new = copy.deepcopy(self) if deep else copy.copy(self)
        object.__setattr__(new, "model_fields_set", set(self.model_fields_set) | set(update or ()))
        for name, value in (update or {}).items():
            setattr_unchecked(new, name, value)
        return new

    copy = model_copy

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        # An old key that was replaced has been deleted.
        return ((name, self.__dict__[name]) for name in self.model_fields if name in self.__dict__)

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other) and [*self] == [*other]
            if isinstance(other, DeepSpeedConfigModel)
            else NotImplemented
        )

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    __str__ = __repr__


def setattr_unchecked(model: DeepSpeedConfigModel, name: str, value: Any) -> None:
    model.__dict__[name] = value


def _dumped(value: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(value, DeepSpeedConfigModel):
        return value.model_dump(**options)
    if isinstance(value, Mapping):
        return {key: _dumped(each, options) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_dumped(each, options) for each in value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if options["mode"] == "json":
        if isinstance(value, enum.Enum):
            return value.value
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
    return value


def get_config_default(config: type[DeepSpeedConfigModel], field_name: str) -> Any:
    """The default of a key of a model. Raises ConfigError: there is no such key, or it has no default."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        what = "has no default" if field is not None else "is not a key"
        raise ConfigError(what, where=f"{config.__name__}.{field_name}", fix="ask for a key that has one")
    return field.get_default()
