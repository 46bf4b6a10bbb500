// Package paths parses API paths.
package paths

import (
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// RequestInfo parses paths as kube-apiserver does (k8s.io/apiserver/pkg/server, NewRequestInfoResolver).
var RequestInfo = &request.RequestInfoFactory{
	APIPrefixes:          sets.NewString("api", "apis"),
	GrouplessAPIPrefixes: sets.NewString("api"),
}
