// Transposes an array tile by tile through shared memory, so that neighboring threads both read and write neighboring
// elements. The grid has one axis. Each block has one tile.
using namespace jaxgrad;

struct Tile {
  unsigned rows, columns;      // within the array
  unsigned long long in, out;  // offsets of the first element
};

// Both factors are signed: the product of an unsigned and a signed factor takes more instructions.
__device__ inline long long offset(unsigned index, int stride) { return (int)index * (long long)stride; }

__device__ inline Tile tile_at(const TransposeArguments& t) {
  unsigned index = blockIdx.x / t.column_tiles;
  const unsigned column = (blockIdx.x - index * t.column_tiles) * t.tile_columns;
  const unsigned row = index % t.row_tiles * t.tile_rows;
  index /= t.row_tiles;
  unsigned long long in = t.in_start + offset(row, t.in_row_stride) + column;
  unsigned long long out = t.out_start + offset(row, t.out_row_stride) + offset(column, t.out_column_stride);
  for (int axis = 0; axis < 3 && index > 0; ++axis) {
    const unsigned position = index % t.sizes[axis];
    index /= t.sizes[axis];
    in += offset(position, t.in_strides[axis]);
    out += offset(position, t.out_strides[axis]);
  }
  return {min(t.rows - row, t.tile_rows), min(t.columns - column, t.tile_columns), in, out};
}

// Tiles of ROWS x COLUMNS elements. If these are 0, `t` has the size of the tiles.
template <class T, unsigned ROWS, unsigned COLUMNS>
__device__ inline void transpose(const T* __restrict__ in, T* __restrict__ out, const TransposeArguments& t) {
  constexpr bool FIXED = ROWS > 0;
  constexpr unsigned EACH = (FIXED ? ROWS * COLUMNS : kTransposeElements) / kTransposeThreads;
  __shared__ T shared[FIXED ? ROWS * (COLUMNS | 1) : kTransposeElements * 3 / 2];
  const Tile tile = tile_at(t);
  const unsigned rows = FIXED ? ROWS : t.tile_rows, columns = FIXED ? COLUMNS : t.tile_columns;
  const unsigned pitch = columns | 1;  // odd: the elements of a column are in different banks
  T values[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned index = k * kTransposeThreads + threadIdx.x, row = index / columns, column = index % columns;
    if (row < tile.rows && column < tile.columns) values[k] = in[tile.in + offset(row, t.in_row_stride) + column];
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned index = k * kTransposeThreads + threadIdx.x, row = index / columns, column = index % columns;
    if (row < tile.rows && column < tile.columns) shared[row * pitch + column] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned index = k * kTransposeThreads + threadIdx.x, column = index / rows, row = index % rows;
    if (row < tile.rows && column < tile.columns)
      out[tile.out + offset(column, t.out_column_stride) + row] = shared[row * pitch + column];
  }
}

// Moves tiles of rows whose elements stay contiguous.
template <class T>
__device__ inline void move_rows(const T* __restrict__ in, T* __restrict__ out, const TransposeArguments& t) {
  constexpr unsigned EACH = kTransposeElements / kTransposeThreads;
  const Tile tile = tile_at(t);
  T values[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned index = k * kTransposeThreads + threadIdx.x, row = index / t.tile_columns,
                   column = index % t.tile_columns;
    if (row < tile.rows && column < tile.columns) values[k] = in[tile.in + offset(row, t.in_row_stride) + column];
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned index = k * kTransposeThreads + threadIdx.x, row = index / t.tile_columns,
                   column = index % t.tile_columns;
    if (row < tile.rows && column < tile.columns) out[tile.out + offset(row, t.out_row_stride) + column] = values[k];
  }
}

#define TRANSPOSE(NAME, T, ROWS, COLUMNS)                                                                           \
  extern "C" __global__ void __launch_bounds__(kTransposeThreads) NAME(const T* in, T* out, TransposeArguments t) { \
    transpose<T, ROWS, COLUMNS>(in, out, t);                                                                        \
  }

TRANSPOSE(transpose_2, unsigned short, kTransposeRows, kTransposeColumns)
TRANSPOSE(transpose_4, unsigned, kTransposeRows, kTransposeColumns)
TRANSPOSE(transpose_8, unsigned long long, kTransposeRows, kTransposeColumns)
TRANSPOSE(transpose_few_2, unsigned short, 0, 0)
TRANSPOSE(transpose_few_4, unsigned, 0, 0)
TRANSPOSE(transpose_few_8, unsigned long long, 0, 0)

#define MOVE_ROWS(NAME, T)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kTransposeThreads) NAME(const T* in, T* out, TransposeArguments t) { \
    move_rows(in, out, t);                                                                                          \
  }

MOVE_ROWS(move_rows_2, unsigned short)
MOVE_ROWS(move_rows_4, unsigned)
MOVE_ROWS(move_rows_8, unsigned long long)
MOVE_ROWS(move_rows_16, uint4)

// For elements of 2 bytes, if all sizes and strides are even. A warp reads and writes 128 bytes at a time. A thread
// reads two columns of two rows and transposes them into two rows of two columns.
extern "C" __global__ void __launch_bounds__(kTransposeThreads)
    transpose_pairs(const unsigned* __restrict__ in, unsigned* __restrict__ out, TransposeArguments t) {
  constexpr unsigned PAIRS = kTransposeRows / 2, WARPS = kTransposeThreads / 32;
  __shared__ unsigned shared[2][PAIRS][PAIRS + 1];  // [column % 2][column / 2][row / 2]
  const Tile tile = tile_at(t);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned upper[PAIRS / WARPS], lower[PAIRS / WARPS];
#pragma unroll
  for (unsigned k = 0; k < PAIRS / WARPS; ++k) {
    const unsigned pair = k * WARPS + warp;
    if (2 * pair < tile.rows && 2 * lane < tile.columns) {
      const unsigned long long at = tile.in / 2 + offset(pair, t.in_row_stride) + lane;
      upper[k] = in[at];
      lower[k] = in[at + t.in_row_stride / 2];
    }
  }
#pragma unroll
  for (unsigned k = 0; k < PAIRS / WARPS; ++k) {
    const unsigned pair = k * WARPS + warp;
    if (2 * pair < tile.rows && 2 * lane < tile.columns) {
      shared[0][lane][pair] = __byte_perm(upper[k], lower[k], 0x5410);
      shared[1][lane][pair] = __byte_perm(upper[k], lower[k], 0x7632);
    }
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = 0; k < kTransposeRows / WARPS; ++k) {
    const unsigned column = k * WARPS + warp;
    if (column < tile.columns && 2 * lane < tile.rows)
      out[(tile.out + offset(column, t.out_column_stride)) / 2 + lane] = shared[column % 2][column / 2][lane];
  }
}
