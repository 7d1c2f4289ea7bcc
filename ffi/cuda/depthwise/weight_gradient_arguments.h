// The arguments of the kernel of weight_gradient.cu. The host compiles this file, and NVRTC compiles it with the
// kernel.

// Sizes of the arrays and where the first tap reads. With two spatial dimensions, axis 0 has one element.
struct DepthwiseGradientArguments {
  int planes;  // of dy, of all images
  int channels;
  int x[3], dy[3];    // spatial sizes
  int padding[3];     // before the first element of x
  int tiles;          // of all planes
  int rows, columns;  // of tiles, of one plane
};
