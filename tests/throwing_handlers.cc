// Handlers that throw, built with jaxgrad's definition of handlers and its parallel loop.
#include <new>
#include <stdexcept>
#include <string>

#include "common/errors.h"
#include "common/handler.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;

enum Kind : int64_t { kLength, kBadAlloc, kOutOfMemory, kMissingLibrary, kInt };

[[noreturn]] void throw_exception(int64_t kind) {
  switch (kind) {
    case kLength:
      throw std::length_error("too long");
    case kBadAlloc:
      throw std::bad_alloc();
    case kOutOfMemory:
      throw OutOfMemory("full");
    case kMissingLibrary:
      throw MissingLibrary("no library");
    default:
      throw 1;
  }
}

ffi::Error on_calling_thread(ffi::ThreadPool, ffi::Result<ffi::AnyBuffer>, int64_t kind) { throw_exception(kind); }

// All tasks run, and one on each thread throws.
ffi::Error on_pool_threads(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer>, int64_t kind) {
  XlaParallel parallel(pool);
  parallel.run(64, &kind, [](void* context, int64_t) { throw_exception(*static_cast<int64_t*>(context)); });
  return ffi::Error::Success();
}

JAXGRAD_DEFINE_HANDLER(throw_on_calling_thread, on_calling_thread,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>().Attr<int64_t>("kind"));
JAXGRAD_DEFINE_HANDLER(throw_on_pool_threads, on_pool_threads,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>().Attr<int64_t>("kind"));

}  // namespace jaxgrad
