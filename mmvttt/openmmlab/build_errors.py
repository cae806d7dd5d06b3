"""Makes a sentence of an error in building from a config, where mmengine prints a traceback."""

from traceback import walk_tb

from mmvttt.errors import suggest

from . import registry as registries


def explain_build(error: KeyError | TypeError | ValueError) -> str | None:
    """Explains an unknown type, such as 'Vittt' for 'mmvttt.Vittt', or an option of a type.

    Args:
        error: The error of building something from a config.

    Returns:
        A message for the author of the config; None for other errors.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    build = next((f for f in frames[::-1] if f.f_code.co_name == 'build_from_cfg'), None)
    if build is None:
        return None
    if not isinstance(error, KeyError):
        # Checks of our own parts name the option, its value and what to do.
        own = frames[-1].f_globals.get('__name__', '').startswith('mmvttt.')
        return str(error) if own or 'unexpected keyword argument' in str(error) else None
    kind, registry = build.f_locals.get('obj_type'), build.f_locals.get('registry')
    # Not a KeyError in a constructor, or of a config without a type.
    if build is not frames[-1] or not isinstance(kind, str):
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
