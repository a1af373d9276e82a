"""A factory that is hidden by a package of megaprec's own is refused with the reason and the
cure."""

import pytest

from megaprec.errors import UserError
from models.decoder.own_model import stage_maker


@pytest.mark.parametrize("package", ["megaprec", "models", "parallel", "tools"])
def test_a_module_in_a_folder_of_a_name_of_ours_is_answered_with_its_file(package: str) -> None:
    with pytest.raises(UserError) as error:
        stage_maker(f"{package}.of_mine.net:build")
    hint = (
        f'megaprec has a package "{package}" itself, which hides yours: give the file, '
        f'"{package}/of_mine/net.py:build"'
    )
    assert str(error.value).endswith(hint)


@pytest.mark.parametrize("factory", ["mine.net:build", "tools/mine.py:build"])
def test_other_modules_that_are_missing_are_not(factory: str) -> None:
    with pytest.raises(UserError) as error:
        stage_maker(factory)
    assert "hides yours" not in str(error.value)
