// The arguments of the kernels of convolution.cu and toeplitz.cu. The host compiles this file, and NVRTC compiles it
// with the kernel.

// Sizes are those of the arrays that the kernel reads and writes: of the forward pass or of the input gradient. The
// block walks along axis 0; convolutions with fewer than three spatial dimensions have axes of one element.
struct DepthwiseArguments {
  int images, channels;
  int in[3], out[3];
  int padding[3];  // before the first element of x; in toeplitz.cu, of the array that the kernel reads
  int length;      // steps with a result per item along axis 0
  int stages;      // copies per item
  int tiles[3];    // per residue class of an axis
  int items;       // tiles of all images
};
