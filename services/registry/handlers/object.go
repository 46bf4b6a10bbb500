package handlers

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	grpccodes "google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/warning"
)

type fieldErrors = field.ErrorList

// decodeError returns a 400 error that names the expected kind.
func (w *writeOperation) decodeError(base error, into runtime.Object, gvk *schema.GroupVersionKind) error {
	kinds, _, err := w.Typer.ObjectKinds(into)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if gvk != nil && gvk.Kind != "" {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: %v", gvk.Kind,
			gvk.Version, kinds[0].Kind, base))
	}
	return apierrors.NewBadRequest(fmt.Sprintf("the object provided is unrecognized (must be of type %s): %v (%s)",
		kinds[0].Kind, base, summarizeData(w.req.Body)))
}

// summarizeData returns the first 30 bytes of a body: JSON as text, anything else in hexadecimal.
func summarizeData(data []byte) string {
	const maxLen = 30
	if len(data) == 0 {
		return "<empty>"
	}
	short, more := data, ""
	if len(data) > maxLen {
		short, more = data[:maxLen], " ..."
	}
	if data[0] == '{' {
		return string(short) + more
	}
	return hex.EncodeToString(short) + more
}

func hasUID(obj runtime.Object) (bool, error) {
	if obj == nil {
		return false, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return false, apierrors.NewInternalError(err)
	}
	return m.GetUID() != "", nil
}

// checkName returns a 400 error if the object's name or namespace differs from the URL's.
func checkName(obj runtime.Object, name, namespace string) error {
	objNamespace, objName, err := objectName(obj)
	switch {
	case err != nil:
		return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s based on URL) was undeterminable: %v",
			name, err))
	case objName != name:
		return apierrors.NewBadRequest(fmt.Sprintf(
			"the name of the object (%s) does not match the name on the URL (%s)", objName, name))
	case namespace != "" && objNamespace != "" && objNamespace != namespace:
		return apierrors.NewBadRequest(fmt.Sprintf("the namespace of the object (%s) does not match the namespace "+
			"on the request (%s)", objNamespace, namespace))
	}
	return nil
}

const (
	duplicateOwners = ".metadata.ownerReferences contains duplicate entries; API server dedups owner " +
		"references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate " +
		"UID(s) observed: %v"
	duplicateOwnersAfter = ".metadata.ownerReferences contains duplicate entries after mutating admission happens; " +
		"API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix " +
		"your requests; duplicate UID(s) observed: %v"
)

// dedupOwnerReferences removes equal owner references and warns about them, as kube-apiserver does
// (k8s.io/apiserver/pkg/endpoints/handlers/rest.go). It takes linear time, because an object of 3 MB can hold 170,000
// references.
func dedupOwnerReferences(ctx context.Context, obj runtime.Object, afterAdmission bool) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	unique, duplicates := distinctOwners(m.GetOwnerReferences())
	if len(duplicates) == 0 {
		return
	}
	format := duplicateOwners
	if afterAdmission {
		format = duplicateOwnersAfter
	}
	warning.AddWarning(ctx, "", fmt.Sprintf(format, strings.Join(duplicates, ", ")))
	m.SetOwnerReferences(unique)
}

// distinctOwners returns the first of each group of equal references, and the UIDs of the other references.
func distinctOwners(refs []metav1.OwnerReference) (unique []metav1.OwnerReference, duplicates []string) {
	type key struct {
		ref                            metav1.OwnerReference // without its pointers
		controller, blockOwnerDeletion string
	}
	flag := func(b *bool) string {
		if b == nil {
			return ""
		}
		return strconv.FormatBool(*b)
	}
	seen := make(map[key]struct{}, len(refs))
	for _, ref := range refs {
		k := key{ref, flag(ref.Controller), flag(ref.BlockOwnerDeletion)}
		k.ref.Controller, k.ref.BlockOwnerDeletion = nil, nil
		if _, ok := seen[k]; ok {
			duplicates = append(duplicates, string(ref.UID))
			continue
		}
		seen[k] = struct{}{}
		unique = append(unique, ref)
	}
	return unique, duplicates
}

// managerOrUserAgent returns the field manager's name: the option, or the user agent's part before the slash. The
// latter has at most 128 bytes.
func managerOrUserAgent(option, userAgent string) string {
	if option != "" {
		return option
	}
	var b strings.Builder
	name, _, _ := strings.Cut(userAgent, "/")
	for _, r := range name {
		if !unicode.IsPrint(r) {
			continue
		}
		if b.Len()+utf8.RuneLen(r) > validation.FieldManagerMaxLength {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// warnStrict adds a warning for each strict decoding error. A YAML error contains several errors, a line for each.
func warnStrict(ctx context.Context, errs []error) {
	for _, e := range errs {
		text := e.Error()
		for _, prefix := range []string{"yaml: unmarshal errors:\n",
			"error converting YAML to JSON: yaml: unmarshal errors:\n"} {
			if rest, ok := strings.CutPrefix(text, prefix); ok {
				text = rest
				break
			}
		}
		if text == e.Error() {
			warning.AddWarning(ctx, "", text)
			continue
		}
		for _, line := range strings.Split(text, "\n") {
			warning.AddWarning(ctx, "", strings.TrimSpace(line))
		}
	}
}

// ofEtcdClient reports whether err comes from etcd or its client, such as a lost connection. The gateway would take its
// gRPC status for the status of the call to registry.
func ofEtcdClient(err error) bool {
	var api apierrors.APIStatus
	if err == nil || errors.As(err, &api) {
		return false
	}
	st, ok := grpcstatus.FromError(err)
	return ok && st.Code() != grpccodes.Canceled && st.Code() != grpccodes.DeadlineExceeded
}

// isTooLarge reports whether etcd or gRPC rejected a value because of its size.
func isTooLarge(err error) bool {
	if err == nil {
		return false
	}
	var e interface {
		Code() grpccodes.Code
		Error() string
	}
	if errors.As(err, &e) && e.Code() == grpccodes.InvalidArgument && e.Error() == "etcdserver: request is too large" {
		return true
	}
	g, ok := err.(interface{ GRPCStatus() *grpcstatus.Status })
	return ok && g.GRPCStatus().Code() == grpccodes.ResourceExhausted &&
		strings.Contains(g.GRPCStatus().Message(), "trying to send message larger than max")
}
