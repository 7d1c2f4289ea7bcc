// A transposition, as the host describes it to the kernels of transposition.cu: the host compiles this, and so does
// NVRTC.
#pragma once

namespace jaxgrad {

// out[b, c, r] = in[b, r, c], for up to three axes b. Columns lie side by side in `in`, rows in `out`.
struct Transposition {
  unsigned rows, columns;
  unsigned row_stride, column_stride;                // elements: between rows in `in`, between columns in `out`
  unsigned sizes[3], in_strides[3], out_strides[3];  // of the axes b
  unsigned tile_rows, tile_columns;                  // of what a block transposes
  unsigned row_tiles, column_tiles;                  // how many of these lie below and beside each other
};

enum {
  kTransposeThreads = 256,    // of a block
  kTransposeRows = 64,        // of a tile that lies in an array with many of both
  kTransposeColumns = 32,     // and its columns; pairs of elements have as many columns as rows
  kTransposeElements = 1024,  // that a tile of few rows or columns may have
};

}  // namespace jaxgrad
