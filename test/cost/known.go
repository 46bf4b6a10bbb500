package main

import "regexp"

// accepted is a finding with a reason.
type accepted struct {
	// shape and kind are patterns of "family: name" and of the finding's kind.
	shape, kind *regexp.Regexp
	reason      string
}

// known are the findings that are accepted. Each reason names the cause.
var known = []accepted{}

// reasonOf returns the reason of a finding, empty if it has none.
func reasonOf(f finding) string {
	for _, k := range known {
		if k.shape.MatchString(f.shape.String()) && k.kind.MatchString(f.kind) {
			return k.reason
		}
	}
	return ""
}
