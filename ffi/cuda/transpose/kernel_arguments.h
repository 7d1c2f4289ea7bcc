// A transposition, as the host describes it to the kernels of transposition.cu: the host compiles this, and so does
// NVRTC.
#pragma once

namespace jaxgrad {

// out[b, c, r] = in[b, r, c], for up to three axes b. Columns lie side by side in `in`. In `out` rows do or, where they
// are moved as they are, columns again. Offsets and strides are in elements; the stride of an axis that is reversed on
// the way is negative in one of the two arrays.
struct Transposition {
  unsigned in_start, out_start;  // where the element [0, 0, 0] lies
  unsigned rows, columns;
  int in_row_stride, out_row_stride, out_column_stride;
  unsigned sizes[3];  // of the axes b
  int in_strides[3], out_strides[3];
  unsigned tile_rows, tile_columns;  // of what a block transposes
  unsigned row_tiles, column_tiles;  // how many of these lie below and beside each other
};

enum {
  kTransposeThreads = 256,    // of a block
  kTransposeRows = 64,        // of a tile that lies in an array with many of both
  kTransposeColumns = 32,     // and its columns; pairs of elements have as many columns as rows
  kTransposeElements = 1024,  // that a tile of few rows or columns may have, or one of rows that are moved
};

}  // namespace jaxgrad
