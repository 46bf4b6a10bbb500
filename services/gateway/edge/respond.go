package edge

import (
	"fmt"
	"io"
	"log"
	"net/http"

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

// NotFound is the answer to a path that nothing serves.
func NotFound(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "404 page not found", http.StatusNotFound)
}

func unreachable(err error) bool {
	return apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err)
}

// quiet drops what net/http says of clients that hang up.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }
