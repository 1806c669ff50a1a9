"""lmkit as an application of Ray Serve: `lmkit_ray_serve.application.application(...)`, or `lmkit ray-serve`."""
