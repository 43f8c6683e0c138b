"""`python -m recipes` lists the recipes: name and first line of what each says of itself."""

from recipes import RECIPES


def list_recipes() -> str:
    """One line a recipe."""
    width = max(map(len, RECIPES))
    firsts = {name: (make.__doc__ or "").splitlines()[0] for name, make in RECIPES.items()}
    return "\n".join(f"{name:<{width}}  {first}" for name, first in firsts.items())


if __name__ == "__main__":
    print(list_recipes())
