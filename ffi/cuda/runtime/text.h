// Functions of text that C++17 lacks.
#pragma once

#include <string>

namespace jaxgrad {

inline bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace jaxgrad
