// Functions that AddressSanitizer and UndefinedBehaviorSanitizer must report: `.ci/sanitize` calls them to see that it
// would find such faults in the handlers.
#include <climits>
#include <vector>

extern "C" int read_past_the_end() {
  const std::vector<int> values(3);
  return values.data()[values.size()];
}

extern "C" int overflow() {
  volatile int largest = INT_MAX;
  return largest + 1;
}
