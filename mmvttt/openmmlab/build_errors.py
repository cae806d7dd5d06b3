"""Makes a sentence of an error in building from a config, where mmengine prints a traceback."""

from traceback import walk_tb

from mmvttt.errors import suggest

from . import registry as registries

# Words of build_from_cfg's errors where a config has something else in the place of a part.
_NO_PART = ('cfg should be a dict', 'must contain the key "type"', 'type must be a str')


def explain_build(error: KeyError | TypeError | ValueError) -> str | None:
    """A message for an unknown type or option in a config that was built; None for other errors."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    build = next((f for f in frames[::-1] if f.f_code.co_name == 'build_from_cfg'), None)
    if build is None:
        return None
    raised = build is frames[-1]
    part = build.f_locals.get('cfg')
    if raised and any(words in str(error) for words in _NO_PART):
        above = [f.f_locals.get('cfg') for f in frames if f.f_code is build.f_code][:-1]
        options = above[-1] if above and isinstance(above[-1], dict) else {}
        name = ' or '.join(f'{key}=' for key, value in options.items() if value == part)
        return f"{name}{part!r}: give a dict with a type, such as dict(type='…')"
    if not isinstance(error, KeyError):
        # Checks of our own parts name the option, its value and what to do.
        ours = frames[-1].f_globals.get('__name__', '').startswith('mmvttt.')
        return str(error) if ours or raised else None
    kind, registry = build.f_locals.get('obj_type'), build.f_locals.get('registry')
    # Not a KeyError in a constructor, or of a config without a type.
    if not raised or not isinstance(kind, str):
        return None
    names = [
        f'mmvttt.{name}'
        for own_registry in vars(registries).values()
        if isinstance(own_registry, registries.OwnRegistry)
        for name in own_registry.names()
    ]
    while registry is not None:
        names += registry.module_dict
        registry = registry.parent
    return f'there is no type {kind!r}{suggest(kind, names)}'
