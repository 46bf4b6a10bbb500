package gateway

import (
	"encoding/json"
	"net/http"
	"path"
	"slices"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/server/flagz"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/server/statusz"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	zpages "k8s.io/component-base/zpages/features"

	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/telemetry"
	"watershed.dev/services/gateway/responsewriters"
)

// servePage serves a page by its decoded path. ServeMux would redirect to the cleaned path. kube-apiserver does not.
func servePage(pages *http.ServeMux, w http.ResponseWriter, req *http.Request) {
	p, clean := req.URL.Path, path.Clean(req.URL.Path)
	if p != clean && (clean == "/" || p != clean+"/") {
		responsewriters.NotFound(w, req)
		return
	}
	if req.URL.RawPath != "" { // ServeMux would match it
		decoded := *req.URL
		decoded.RawPath = ""
		copied := *req
		req, copied.URL = &copied, &decoded
	}
	pages.ServeHTTP(w, req)
}

// page serves GET of a path in a single media type. It rejects other requests as kube-apiserver's web framework
// (go-restful) does.
func page(mux *http.ServeMux, path, mediaType string, serve http.HandlerFunc) {
	getOnly := func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Method != http.MethodGet:
			responsewriters.Error(w, req, responsewriters.V1, responsewriters.MethodNotAllowed)
		case !responsewriters.Acceptable(req.Header.Get("Accept"), []string{mediaType}):
			responsewriters.Error(w, req, responsewriters.V1, responsewriters.NewNotAcceptable([]string{mediaType}))
		default:
			serve(w, req)
		}
	}
	mux.HandleFunc(path, getOnly)
	mux.HandleFunc(path+"/{$}", getOnly)
}

func writeVersion(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, kubeversion.Info())
}

// ownPaths are the paths of the gateway's own pages that the index lists, besides the health checks.
var ownPaths = []string{"/.well-known/openid-configuration", "/api", "/apis", "/apis/", "/metrics", "/metrics/slis",
	"/openapi/v2", "/openapi/v3", "/openapi/v3/", "/openid/v1/jwks", "/version"}

// index writes the list of served paths, which begins with the paths of the gateway's own pages.
func (g *Service) index(w http.ResponseWriter, own []string) {
	paths := slices.Clone(own)
	if v := g.discovery.View(); v != nil {
		for _, group := range v.Groups {
			if group.Name == "" {
				paths = append(paths, "/api/v1")
				continue
			}
			paths = append(paths, "/apis/"+group.Name)
			for _, ver := range group.Versions {
				paths = append(paths, "/apis/"+group.Name+"/"+ver)
			}
		}
	}
	slices.Sort(paths)
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, map[string][]string{"paths": paths})
}

// componentName is the name of kube-apiserver in /flagz and /statusz.
const componentName = "apiserver"

// installFlagz serves /flagz, the flags of the gateway's process, unless its feature gate is off. It returns the path.
func (g *Service) installFlagz(pages *http.ServeMux) (paths []string) {
	if g.deps.Flags == nil || !utilfeature.DefaultFeatureGate.Enabled(zpages.ComponentFlagz) {
		return nil
	}
	flagz.Install(pages, componentName, flagz.NamedFlagSetsReader{
		FlagSets: cliflag.NamedFlagSets{FlagSets: map[string]*pflag.FlagSet{"": g.deps.Flags}},
	})
	return []string{flagz.DefaultFlagzPath}
}

// installStatusz serves /statusz, unless its feature gate is off. The page lists paths and its own path, which
// installStatusz returns.
func installStatusz(pages *http.ServeMux, paths []string) []string {
	if !utilfeature.DefaultFeatureGate.Enabled(zpages.ComponentStatusz) {
		return paths
	}
	paths = append(paths, statusz.DefaultStatuszPath)
	slices.Sort(paths)
	statusz.Install(pages, componentName, statusz.NewRegistry(compatibility.DefaultBuildEffectiveVersion(),
		statusz.WithListedPaths(paths)))
	return paths
}

// installDebugFlags serves /debug/flags/v, which changes the verbosity of the gateway's process. The debug address of
// each other process serves the same path.
func installDebugFlags(pages *http.ServeMux) {
	recorder := mux.NewPathRecorderMux("debug")
	routes.DebugFlags{}.Install(recorder, "v", routes.StringFlagPutHandler(telemetry.SetVerbosity))
	pages.Handle("/debug/flags", recorder)
	pages.Handle("/debug/flags/", recorder)
}

// writeJSON writes v as indented JSON, as kube-apiserver does for its own pages.
func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(b)
}
