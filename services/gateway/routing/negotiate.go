package routing

import (
	"net/http"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/warning"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/responsewriters"
)

// negotiate chooses the response's encoding.
func (c *requestContext) negotiate() (*registryv1.Output, error) {
	if err := c.dialect.checkAccept(c); err != nil {
		return nil, err
	}
	if c.apiResource.Deprecation != "" {
		warning.AddWarning(c.req.Context(), "", c.apiResource.Deprecation)
	}
	m, ok := negotiation.NegotiateMediaTypeOptions(c.req.Header.Get("Accept"), c.serializers(),
		restrictions{c.dialect, c.apiResource})
	if !ok {
		return nil, negotiation.NewNotAcceptableError(c.apiResource.MediaTypes)
	}
	out := &registryv1.Output{MediaType: m.Accepted.MediaType, Pretty: m.Pretty || pretty(c.req)}
	if m.Convert != nil { // a watch keeps the kind, but not the header
		out.As = &commonv1.Kind{Group: strings.Clone(m.Convert.Group), Version: strings.Clone(m.Convert.Version),
			Kind: strings.Clone(m.Convert.Kind)}
	}
	return out, nil
}

// serializers returns the media types of the resource.
func (c *requestContext) serializers() []runtime.SerializerInfo {
	var infos []runtime.SerializerInfo
	for _, s := range responsewriters.ResourceCodecs().SupportedMediaTypes() {
		if slices.Contains(c.apiResource.MediaTypes, s.MediaType) {
			infos = append(infos, s)
		}
	}
	return infos
}

// streamMediaTypes returns the media types of the resource's watches, for the text of an error.
func (c *requestContext) streamMediaTypes() []string {
	_, streams := negotiation.MediaTypesForSerializer(selectedMediaTypes{infos: c.serializers()})
	return streams
}

// selectedMediaTypes is a serializer of which only the media types are known.
type selectedMediaTypes struct {
	runtime.NegotiatedSerializer
	infos []runtime.SerializerInfo
}

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (s selectedMediaTypes) SupportedMediaTypes() []runtime.SerializerInfo { return s.infos }

// restrictions are the conversions that a resource supports (negotiation.EndpointRestrictions).
type restrictions struct {
	dialect     dialect
	apiResource *registryv1.APIResource
}

func (r restrictions) AllowsMediaTypeTransform(mimeType, mimeSubType string, gvk *schema.GroupVersionKind) bool {
	if gvk == nil {
		return r.dialect.offersMediaType(mimeSubType)
	}
	return responsewriters.OffersTransform(mimeType, mimeSubType, gvk) && (gvk.Kind != "Table" || r.apiResource.Table)
}

func (restrictions) AllowsServerVersion(v string) bool { return v == "v1" }
func (restrictions) AllowsStreamSchema(s string) bool  { return s == "watch" }

// pretty reports whether JSON is indented. curl, wget and browsers get indented JSON by default.
func pretty(req *http.Request) bool {
	if strings.Contains(req.URL.RawQuery, "pretty") {
		if p := req.URL.Query().Get("pretty"); p != "" {
			return p == "true" || p == "1" || p == "t" || p == "T" || p == "TRUE" || p == "True"
		}
	}
	agent := req.UserAgent()
	return strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") ||
		strings.HasPrefix(agent, "Mozilla/5.0")
}

func mediaType(req *http.Request) string { return withoutParameters(req.Header.Get("Content-Type")) }

// withoutParameters returns a media type without its parameters.
func withoutParameters(mediaType string) string {
	t, _, _ := strings.Cut(mediaType, ";")
	return strings.TrimSpace(t)
}
