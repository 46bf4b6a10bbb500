package edge

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// WriteError answers err as a metav1.Status in the encoding that the client accepts.
func WriteError(w http.ResponseWriter, req *http.Request, gv schema.GroupVersion, err error) {
	responsewriters.ErrorNegotiated(err, Codecs, gv, w, req)
}

// WriteObject answers one of the gateway's own objects.
func WriteObject(w http.ResponseWriter, req *http.Request, code int, obj runtime.Object) {
	responsewriters.WriteObjectNegotiated(Codecs, negotiation.DefaultEndpointRestrictions, schema.GroupVersion{Version: "v1"}, w, req, code, obj, false)
}

// WriteCode answers what kube-apiserver's web framework says of a request that no resource takes: a Status with the
// code's own name.
func WriteCode(w http.ResponseWriter, req *http.Request, code int, message string) {
	WriteError(w, req, schema.GroupVersion{Version: "v1"}, apierrors.NewGenericServerResponse(code, "", schema.GroupResource{}, "", fmt.Sprintf("%d: %s", code, message), 0, false))
}

// Produced is what kube-apiserver's web framework asks of Accept before anything else does: one media type that is
// among those served, whatever its parameters, or */*.
func Produced(accept string, types []string) bool {
	if accept == "" {
		return true
	}
	for _, a := range strings.Split(accept, ",") {
		t, _, _ := strings.Cut(a, ";")
		if t = strings.TrimSpace(t); t == "*/*" || slices.Contains(types, t) {
			return true
		}
	}
	return false
}

// NotProduced is its answer where there is none.
func NotProduced(types []string) error {
	return apierrors.NewGenericServerResponse(http.StatusNotAcceptable, "", schema.GroupResource{}, "", "406: Not Acceptable\n\nAvailable representations: "+strings.Join(types, ", "), 0, false)
}

// WriteUnversioned answers one of the oldest documents, which are as Kubernetes 1.0 had them: without an apiVersion.
func WriteUnversioned(w http.ResponseWriter, req *http.Request, obj runtime.Object) {
	var types []string
	for _, m := range Codecs.SupportedMediaTypes() {
		types = append(types, m.MediaType)
	}
	if !Produced(req.Header.Get("Accept"), types) {
		WriteError(w, req, schema.GroupVersion{Version: "v1"}, NotProduced(types))
		return
	}
	m, info, err := negotiation.NegotiateOutputMediaType(req, Codecs, negotiation.DefaultEndpointRestrictions)
	if err != nil {
		WriteError(w, req, schema.GroupVersion{Version: "v1"}, err)
		return
	}
	s := info.Serializer
	if m.Pretty && info.PrettySerializer != nil {
		s = info.PrettySerializer
	}
	w.Header().Set("Content-Type", info.MediaType)
	_ = s.Encode(obj, w)
}

// NotFound is the answer to a path that nothing serves.
func NotFound(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "404 page not found", http.StatusNotFound)
}

func unreachable(err error) bool {
	return apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err)
}

// quiet drops what net/http says of clients that hang up.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }
