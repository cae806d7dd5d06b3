"""Position embeddings of another grid than the model's: resized when they are used or loaded."""

import logging
from collections.abc import Mapping

from mmengine.logging import print_log
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

Grid = tuple[int, int]


class GridOfWeights(nn.Module):
    """Lets a module load the `pos_embed` of another grid, which its state dict notes.

    Attributes:
        pos_embed: `(1, num_prefix_rows + h·w, C)`, or None.
        grid: Its (h, w).
        antialias: Whether resizing low-passes as timm does.
        num_prefix_rows: Rows in front of the grid's, of class or register tokens.
    """

    pos_embed: Tensor | None
    grid: Grid
    antialias: bool
    num_prefix_rows: int = 0

    def keep_grid_with_weights(self) -> None:
        """Notes the grid in the metadata of state dicts, and resizes what is loaded."""
        self.register_state_dict_post_hook(_note_grid)
        self.register_load_state_dict_pre_hook(_adapt_before_loading)

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '') -> None:
        """Lets weights of another image size load: resizes their position embedding, in place.

        Their grid is what `state_dict()` of a backbone notes in its `_metadata`. Without the note,
        as many positions as the backbone's are of its own grid, and others of a square, or of the
        only grid of about its own aspect ratio; where that may be wrong, a warning is logged.

        Args:
            state_dict: Weights that are about to be loaded.
            prefix: What precedes the backbone's own names in it.
        """
        notes = getattr(state_dict, '_metadata', None)
        if not isinstance(notes, dict):
            notes = {}
        note = notes.get(prefix[:-1])
        if self._adapt(state_dict, prefix, note) and isinstance(note, Mapping):
            notes[prefix[:-1]] = {**note, 'grid': self.grid}

    def _adapt(self, state_dict: dict[str, Tensor], prefix: str, note: object) -> bool:
        """Whether the position embedding was resized, from the grid in `note` if there is one."""
        key = f'{prefix}pos_embed'
        stored = state_dict.get(key)
        # Anything else stays, and is reported as a mismatch.
        if self.pos_embed is None or stored is None or stored.dim() != 3:
            return False
        if 0 in stored.shape or not stored.is_floating_point():
            return False
        count = stored.shape[1] - self.num_prefix_rows
        match note:
            case {'grid': (int(h), int(w))} if h > 0 and h * w == count:
                grid = h, w
            case _:
                if stored.shape[1] == self.pos_embed.shape[1]:
                    return False
                grid = self._likely_grid(count)
        if grid is None or grid == self.grid:
            return False
        state_dict[key] = self._resized(stored, self.grid, grid)
        return True

    def _resized(self, embedding: Tensor, new: Grid, old: Grid) -> Tensor:
        """An embedding `(1, num_prefix_rows + h·w, C)` of the grid `old` for the grid `new`."""
        return resample_abs_pos_embed(
            embedding,
            list(new),
            list(old),
            num_prefix_tokens=self.num_prefix_rows,
            antialias=self.antialias,
        )

    def _likely_grid(self, count: int) -> Grid | None:
        """The grid that so many positions may be of; None if that cannot be told."""
        h, w = self.grid
        side = round(count**0.5)
        if side * side == count:
            grid = side, side
            if h == w:
                return grid
        else:
            # h = ⌈H / patch⌉ and w = ⌈W / patch⌉ leave a range to H / W: two must overlap.
            divisors = ((a, count // a) for a in range(1, count + 1) if count % a == 0)
            fits = [
                (a, b)
                for a, b in divisors
                if (a - 1) * (w - 1) < h * b and (h - 1) * (b - 1) < a * w
            ]
            grid = fits[0] if len(fits) == 1 else None
        taken = f'{grid[0]}×{grid[1]}' if grid else 'none, and it is not resized'
        print_log(
            f'The weights have a position embedding of {count} positions and do not say of which '
            f'grid; taken: {taken}. If that is wrong, load them with the img_size that they were '
            'trained with, and save them: the grid is noted then.',
            'current',
            logging.WARNING,
        )
        return grid


def _adapt_before_loading(
    module: GridOfWeights, state_dict: dict[str, Tensor], prefix: str, note: object, *_: object
) -> None:
    # torch hands the weights of a part over without their notes, and its own note beside them.
    module._adapt(state_dict, prefix, note)


def _note_grid(module: GridOfWeights, _: object, __: str, note: dict[str, object]) -> None:
    # Not an entry of the state dict: files without the note load, and files with it load elsewhere.
    if module.pos_embed is not None:
        note['grid'] = module.grid
