// The argument of the kernels of transpose.cu. Both the host compiler and NVRTC compile this file.
#pragma once

namespace jaxgrad {

// out[b, c, r] = in[b, r, c], where b stands for up to three batch axes. Columns are contiguous in `in`. In `out` rows
// are contiguous, or, if rows are only moved, columns again. Offsets and strides are in elements. An axis that is
// reversed has a negative stride in one of the two arrays.
struct TransposeArguments {
  unsigned in_start, out_start;  // offsets of the element [0, 0, 0]
  unsigned rows, columns;
  int in_row_stride, out_row_stride, out_column_stride;
  unsigned sizes[3];  // of the batch axes
  int in_strides[3], out_strides[3];
  unsigned tile_rows, tile_columns;  // of the tile of one block
  unsigned row_tiles, column_tiles;  // number of tiles along each axis
};

enum {
  kTransposeThreads = 256,    // per block
  kTransposeRows = 64,        // rows of a tile if the array has many rows and columns
  kTransposeColumns = 32,     // and its columns; tiles of pairs of elements have kTransposeRows columns
  kTransposeElements = 1024,  // of a tile with few rows or columns, or of rows that are only moved
};

}  // namespace jaxgrad
