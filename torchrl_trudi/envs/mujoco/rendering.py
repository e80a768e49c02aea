"""Pictures of one simulation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs._validation import check_int, did_you_mean
from torchrl_trudi.envs.mujoco._logging import silent_physics
from torchrl_trudi.envs.mujoco._physics_driver import PhysicsDriver

# Of this process: a second attempt after a failed one can abort it.
_failures: list[str] = []


class SimulationRenderer:
    """Renders single simulations off screen.

    Args:
        driver (PhysicsDriver): the simulations.
        width (int): pixels.
        height (int): pixels.
        camera (Mapping[str, Any]): attributes of the free camera.

    Raises:
        RuntimeError: if there is no OpenGL to render with.
    """

    def __init__(
        self, driver: PhysicsDriver, width: int, height: int, camera: Mapping[str, Any]
    ) -> None:
        self.size = (width, height)
        # A model of its own, into which the fields of the simulation are written.
        self._model = copy.copy(driver.model)
        view = self._model.vis.global_
        view.offwidth, view.offheight = max(view.offwidth, width), max(view.offheight, height)
        self._data = mujoco.MjData(self._model)
        self._free_camera = _free_camera(self._model, camera)
        if _failures:
            raise RuntimeError(_failures[0])
        try:
            self._renderer = mujoco.Renderer(self._model, height, width)
        except Exception as err:
            # What is raised depends on the backend: AttributeError, ImportError, RuntimeError.
            _failures.append(
                "MuJoCo cannot make an OpenGL context to render with. Without a display, set the "
                "environment variable MUJOCO_GL to 'egl' or 'osmesa' before mujoco is imported, "
                "and install that library (Debian: libegl1, libopengl0 and libgl1-mesa-dri, or libosmesa6). "
                f"The error was: {type(err).__name__}: {err}"
            )
            raise RuntimeError(_failures[0]) from err

    def render(self, driver: PhysicsDriver, index: int, camera: int | str | None) -> np.ndarray:
        """Renders a simulation.

        Args:
            driver (PhysicsDriver): the simulations.
            index (int): which.
            camera (int or str, optional): a camera of the model; ``None`` takes ``"track"`` if
                there is one, else the free camera.

        Returns:
            numpy.ndarray: ``[height, width, 3]`` uint8.

        Raises:
            ValueError: if there is no such camera.
        """
        driver.get_model(index, self._model)
        driver.get_data(index, self._data)
        with silent_physics():
            mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, self._find_camera(camera))
        return self._renderer.render()

    def _find_camera(self, camera: int | str | None) -> Any:
        names = [self._model.camera(i).name for i in range(self._model.ncam)]
        if camera is None:
            return "track" if "track" in names else self._free_camera
        if isinstance(camera, str):
            if camera not in names:
                raise ValueError(
                    f"the model has no camera {camera!r}; it has {names}.{did_you_mean(camera, names)}"
                )
            return camera
        if check_int("camera", camera, -1) >= self._model.ncam:
            raise ValueError(f"camera={camera!r}, but the model has the cameras {names}.")
        return self._free_camera if camera == -1 else camera

    def close(self) -> None:
        """Frees the OpenGL context."""
        self._renderer.close()


def _free_camera(model: mujoco.MjModel, attributes: Mapping[str, Any]) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    for name, value in attributes.items():
        if name == "trackbodyid" and value >= 0:
            camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        if isinstance(getattr(camera, name), np.ndarray):
            getattr(camera, name)[:] = value
        else:
            setattr(camera, name, value)
    return camera
